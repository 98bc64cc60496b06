//! What the objects of a graph would cost those who make them.
//!
//! A graph is never larger than its pickle, but what is made of it may be. A tuple that holds the same tuple twice, which
//! holds the same tuple twice, and so on, has a hundred bytes at sixty levels and a hash that takes Python for ever. So it
//! is computed how many objects everything has when it is spelled out, which is what hashing and comparing look at; the sum
//! of that over all references has a limit. What calls copy is the business of who calls.

use super::graph::{Graph, Make, Node, NodeId, Object};
use crate::error::{Error, Result};

/// The sum that is allowed: about one for each byte of the longest pickle.
const COST_MAX: u64 = 1 << 28;
/// How many bytes of an integer count as one object.
const WORD_BYTES: usize = 8;

/// Refuses a graph that costs too much.
///
/// # Errors
/// `Unsupported`.
pub(super) fn check(graph: &Graph) -> Result<()> {
    let sizes = spelled_sizes(graph);
    let mut sum = 0u64;
    for node in graph.nodes() {
        let mut refer = |id: &NodeId| sum = sum.saturating_add(u64::from(sizes[id.index()]) - 1);
        match node {
            Node::Tuple(elements) => elements.iter().for_each(&mut refer),
            Node::List(elements) | Node::Set(elements) | Node::FrozenSet(elements) => {
                elements.iter().for_each(&mut refer);
            }
            Node::Dict(items) => items.iter().flat_map(|(key, value)| [key, value]).for_each(&mut refer),
            Node::Object(object) => {
                object.items.iter().flat_map(|(key, value)| [key, value]).for_each(&mut refer);
                object.elements.iter().chain(&object.states).for_each(&mut refer);
                refer(&object.arguments);
            }
            _ => {}
        }
    }
    if sum > COST_MAX {
        let text = "the objects of the file refer to each other so often that making them would take more than";
        return Err(Error::unsupported(format!("{text} {COST_MAX} steps")));
    }
    Ok(())
}

/// How many objects each node has, spelled out. Those that have a hash have parts with smaller numbers only, so one pass is
/// enough; what can be changed later has none.
fn spelled_sizes(graph: &Graph) -> Vec<u32> {
    let mut sizes: Vec<u32> = Vec::with_capacity(graph.len());
    for node in graph.nodes() {
        let sum = |elements: &[NodeId]| elements.iter().fold(1, |sum: u32, id| sum.saturating_add(sizes[id.index()]));
        let size = match node {
            Node::Tuple(elements) => sum(elements),
            Node::FrozenSet(elements) => sum(elements),
            Node::LongInt(bytes) => 1 + (bytes.len() / WORD_BYTES) as u32,
            Node::Object(object) if is_tuple(graph, object) => sum(&[object.arguments]),
            _ => 1,
        };
        sizes.push(size);
    }
    sizes
}

/// Whether it may be a tuple of a class of its own. All else that has a hash has it of a few attributes.
fn is_tuple(graph: &Graph, object: &Object) -> bool {
    object.make == Make::NewObject || graph.global(object.callable) == Some(("torch", "Size"))
}
