//! What a state has besides tensors: what a file of tensors alone leaves out.

use super::names::{Part, WayId, Ways};
use super::tensor;
use super::walk::is_parameter;
use crate::pickle::{Graph, Node, NodeId};

/// How many are named at the most.
pub const OTHERS_MAX: usize = 10_000;

/// The name of each value that is no tensor, no parameter and no container of such, and what it is. Of objects that are
/// more than their tensors (attributes, arguments) nothing more is said than that they are objects. What lies too deep to
/// have a name, and what is beyond [`OTHERS_MAX`], is left away.
#[must_use]
pub fn others(graph: &Graph) -> Vec<(String, &'static str)> {
    let mut ways = Ways::new(graph);
    let mut seen = vec![false; graph.len()];
    let mut todo = vec![(graph.root(), Ways::ROOT, Part::Same)];
    let mut found = Vec::new();
    while let Some((id, above, part)) = todo.pop() {
        let kind = match graph.node(id) {
            Node::None => "None",
            Node::Bool(_) => "bool",
            Node::Int(_) | Node::LongInt(_) => "int",
            Node::Float(_) => "float",
            Node::Str(_) => "str",
            Node::Bytes(_) | Node::ByteArray(_) => "bytes",
            Node::Global(..) => "class or function",
            Node::Set(_) | Node::FrozenSet(_) => "set",
            Node::Persistent(_) => "storage",
            Node::Object(object) if tensor::is_tensor(graph, object) || is_parameter(graph, object) => continue,
            Node::Object(object) if graph.global(object.callable) != Some(("collections", "OrderedDict")) => "object",
            Node::Tuple(_) | Node::List(_) | Node::Dict(_) | Node::Object(_) => {
                if std::mem::replace(&mut seen[id.index()], true) {
                    continue;
                }
                let Ok(way) = ways.below(above, part) else { continue };
                let from = todo.len();
                match graph.node(id) {
                    Node::Tuple(elements) => number(&mut todo, way, elements),
                    Node::List(elements) => number(&mut todo, way, elements),
                    Node::Dict(items) => todo.extend(items.iter().map(|(key, value)| (*value, way, Part::Key(*key)))),
                    Node::Object(object) => {
                        todo.extend(object.items.iter().map(|(key, value)| (*value, way, Part::Key(*key))));
                    }
                    _ => {}
                }
                todo[from..].reverse();
                continue;
            }
        };
        if found.len() == OTHERS_MAX {
            break;
        }
        if let Ok(name) = ways.spell(above, part) {
            found.push((name, kind));
        }
    }
    found
}

fn number(todo: &mut Vec<(NodeId, WayId, Part)>, way: WayId, elements: &[NodeId]) {
    todo.extend(elements.iter().enumerate().map(|(index, element)| (*element, way, Part::Index(index as u32))));
}
