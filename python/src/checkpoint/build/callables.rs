//! Callables that a pickle may use before its tensors' bytes are read.

use deepnvme_format::pickle::{Graph, Node};

/// Allowed callables that make no tensor.
pub(super) const WITHOUT_TENSOR: [(&str, &str); 12] = [
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("_codecs", "encode"),
    ("builtins", "set"),
    ("__builtin__", "set"),
    ("builtins", "complex"),
    ("__builtin__", "complex"),
    ("builtins", "bytearray"),
    ("__builtin__", "bytearray"),
    ("builtins", "frozenset"),
    ("__builtin__", "frozenset"),
];
/// Allowed callables that make a tensor.
const TENSORS: [(&str, &str); 3] = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
];

/// Returns whether no object reads tensor bytes while it is built.
pub(in crate::checkpoint) fn is_plain(graph: &Graph) -> bool {
    graph.nodes().iter().all(|node| match node {
        Node::Object(object) => {
            let global = graph.global(object.callable);
            global.is_some_and(|global| WITHOUT_TENSOR.contains(&global) || TENSORS.contains(&global))
        }
        _ => true,
    })
}
