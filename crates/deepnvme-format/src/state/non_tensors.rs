//! Values of a state that are not tensors, and so are lost in a file of tensors only.

use super::paths::{PathId, PathPart, Paths};
use super::tensor;
use super::walk::is_parameter;
use crate::pickle::{Graph, Node, NodeId, Object};

/// The maximum number of values that are listed.
pub const NON_TENSORS_MAX: usize = 10_000;

/// The kind of a sparse tensor, as [`non_tensors`] names it.
pub const SPARSE_TENSOR: &str = "sparse tensor";
/// The kind of a nested tensor.
pub const NESTED_TENSOR: &str = "nested tensor";
/// The kind of any other object.
pub const OBJECT: &str = "object";

/// Returns name and kind of each value that is not a tensor, a parameter, or a tuple, list or dict. A set or another
/// object is listed as one value, whatever it contains. The values of a shared container are listed once. Omits values
/// that are nested too deep, values with too long a name, and all after the first [`NON_TENSORS_MAX`].
#[must_use]
pub fn non_tensors(graph: &Graph) -> Vec<(String, &'static str)> {
    let mut paths = Paths::new(graph);
    let mut seen = vec![false; graph.len()];
    let mut found = Vec::new();
    // Names that were built, or were too long: both take the same time.
    let mut tried = 0;
    let mut next = Some((graph.root(), Paths::ROOT, PathPart::Same));
    // Containers in progress, and the position in each: their elements are visited in turn.
    let mut open: Vec<(NodeId, PathId, usize)> = Vec::new();
    loop {
        let (id, above, part) = match (next.take(), open.last_mut()) {
            (Some(step), _) => step,
            (None, Some((container, path, at))) => match part_at(graph, *container, *at) {
                Some((id, part)) => {
                    *at += 1;
                    (id, *path, part)
                }
                None => {
                    open.pop();
                    continue;
                }
            },
            (None, None) => return found,
        };
        match kind(graph, id) {
            ValueKind::Tensor => {}
            ValueKind::Other(kind) => {
                if tried == NON_TENSORS_MAX {
                    return found;
                }
                tried += 1;
                found.extend(paths.name(above, part).ok().map(|name| (name, kind)));
            }
            ValueKind::Container => {
                if !std::mem::replace(&mut seen[id.index()], true)
                    && let Ok(path) = paths.below(above, part, id)
                {
                    open.push((id, path, 0));
                }
            }
        }
    }
}

/// Returns the kind of the first sparse or nested tensor, wherever it is: also inside a set or an object.
#[must_use]
pub fn tensor_of_tensors(graph: &Graph) -> Option<&'static str> {
    graph.nodes().iter().find_map(|node| match node {
        Node::Object(object) => Some(object_kind(graph, object)).filter(|kind| *kind != OBJECT),
        _ => None,
    })
}

enum ValueKind {
    Tensor,
    Container,
    Other(&'static str),
}

fn kind(graph: &Graph, id: NodeId) -> ValueKind {
    ValueKind::Other(match graph.node(id) {
        Node::None => "None",
        Node::Bool(_) => "bool",
        Node::Int(_) | Node::LongInt(_) => "int",
        Node::Float(_) => "float",
        Node::Str(_) | Node::Surrogates(_) => "str",
        Node::Bytes(_) | Node::ByteArray(_) => "bytes",
        Node::Global(..) => "class or function",
        Node::Set(_) | Node::FrozenSet(_) => "set",
        Node::Persistent(_) => "storage",
        Node::Object(object) if tensor::call(graph, object).is_some() || is_parameter(graph, object) => {
            return ValueKind::Tensor;
        }
        Node::Object(object) if graph.global(object.callable) != Some(("collections", "OrderedDict")) => {
            object_kind(graph, object)
        }
        Node::Tuple(_) | Node::List(_) | Node::Dict(_) | Node::Object(_) => return ValueKind::Container,
    })
}

/// Names the kind of an object. Sparse and nested tensors have no storage of their own: they are made of other tensors.
fn object_kind(graph: &Graph, object: &Object) -> &'static str {
    match graph.global(object.callable) {
        Some(("torch._utils", "_rebuild_sparse_tensor")) => SPARSE_TENSOR,
        Some(("torch._utils", "_rebuild_nested_tensor")) => NESTED_TENSOR,
        _ => OBJECT,
    }
}

/// Returns the element of a container at a position.
fn part_at(graph: &Graph, container: NodeId, at: usize) -> Option<(NodeId, PathPart)> {
    let numbered = |elements: &[NodeId]| elements.get(at).map(|id| (*id, PathPart::Index(at as u32)));
    let keyed = |items: &[(NodeId, NodeId)]| items.get(at).map(|(key, value)| (*value, PathPart::Key(*key)));
    match graph.node(container) {
        Node::Tuple(elements) => numbered(elements),
        Node::List(elements) => numbered(elements),
        Node::Dict(items) => keyed(items),
        Node::Object(object) => keyed(&object.items),
        _ => None,
    }
}
