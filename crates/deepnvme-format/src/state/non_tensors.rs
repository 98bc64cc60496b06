//! What a state has besides tensors: what a file of tensors alone leaves out.

use super::names::{Part, WayId, Ways};
use super::tensor;
use super::walk::is_parameter;
use crate::pickle::{Graph, Node, NodeId};

/// How many are named at the most.
pub const OTHERS_MAX: usize = 10_000;

/// The name of each value that is no tensor, no parameter and no container of such, and what it is. Of objects that are
/// more than their tensors (attributes, arguments) nothing more is said than that they are objects. What lies too deep or
/// too far to have a name, and what is beyond [`OTHERS_MAX`], is left away.
#[must_use]
pub fn others(graph: &Graph) -> Vec<(String, &'static str)> {
    let mut ways = Ways::new(graph);
    let mut seen = vec![false; graph.len()];
    let mut found = Vec::new();
    // How many a name was looked for: those that have none cost as much.
    let mut looked = 0;
    let mut next = Some((graph.root(), Ways::ROOT, Part::Same));
    // Containers that are being gone through, and how far: what they refer to is not noted before it is its turn.
    let mut open: Vec<(NodeId, WayId, usize)> = Vec::new();
    loop {
        let (id, above, part) = match (next.take(), open.last_mut()) {
            (Some(step), _) => step,
            (None, Some((container, way, at))) => match part_at(graph, *container, *at) {
                Some((id, part)) => {
                    *at += 1;
                    (id, *way, part)
                }
                None => {
                    open.pop();
                    continue;
                }
            },
            (None, None) => return found,
        };
        match kind(graph, id) {
            Kind::Tensor => {}
            Kind::Other(kind) => {
                if looked == OTHERS_MAX {
                    return found;
                }
                looked += 1;
                found.extend(ways.spell(above, part).ok().map(|name| (name, kind)));
            }
            Kind::Container => {
                if !std::mem::replace(&mut seen[id.index()], true)
                    && let Ok(way) = ways.below(above, part)
                {
                    open.push((id, way, 0));
                }
            }
        }
    }
}

enum Kind {
    Tensor,
    Container,
    Other(&'static str),
}

fn kind(graph: &Graph, id: NodeId) -> Kind {
    Kind::Other(match graph.node(id) {
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
            return Kind::Tensor;
        }
        Node::Object(object) if graph.global(object.callable) != Some(("collections", "OrderedDict")) => "object",
        Node::Tuple(_) | Node::List(_) | Node::Dict(_) | Node::Object(_) => return Kind::Container,
    })
}

/// What a container has at a place.
fn part_at(graph: &Graph, container: NodeId, at: usize) -> Option<(NodeId, Part)> {
    let numbered = |elements: &[NodeId]| elements.get(at).map(|id| (*id, Part::Index(at as u32)));
    let keyed = |items: &[(NodeId, NodeId)]| items.get(at).map(|(key, value)| (*value, Part::Key(*key)));
    match graph.node(container) {
        Node::Tuple(elements) => numbered(elements),
        Node::List(elements) => numbered(elements),
        Node::Dict(items) => keyed(items),
        Node::Object(object) => keyed(&object.items),
        _ => None,
    }
}
