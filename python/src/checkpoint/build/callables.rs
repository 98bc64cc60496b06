//! What a pickle may call while the bytes of its tensors are on their way.

use deepnvme_format::pickle::{Graph, Node};

/// What may be called while bytes are on their way, and makes no tensor.
pub(super) const PLAIN: [(&str, &str); 12] = [
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
/// And what makes one.
const TENSORS: [(&str, &str); 3] = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
];

/// Whether none of the objects looks at bytes when it is made.
pub(in crate::checkpoint) fn is_plain(graph: &Graph) -> bool {
    graph.nodes().iter().all(|node| match node {
        Node::Object(object) => {
            let global = graph.global(object.callable);
            global.is_some_and(|global| PLAIN.contains(&global) || TENSORS.contains(&global))
        }
        _ => true,
    })
}
