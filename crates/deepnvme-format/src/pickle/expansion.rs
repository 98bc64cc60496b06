//! Limits the expanded size of a graph.
//!
//! A graph is never larger than its pickle, but the objects made from it may be. A tuple that contains the same tuple
//! twice, which contains the same tuple twice, and so on, has a hundred bytes at sixty levels, and hashing it never
//! ends. So this computes the number of objects of each node without sharing, which is the work of hashing and
//! comparing. The sum over all references is limited. Copies by calls are the caller's responsibility.

use super::graph::{Graph, Make, Node, NodeId, Object};
use crate::error::{Error, Result};

/// The maximum sum: about one for each byte of the longest pickle.
const EXPANDED_SIZE_MAX: u64 = 1 << 28;
/// Bytes of an integer that count as one object.
const WORD_BYTES: usize = 8;

/// Refuses a graph that is too large when expanded.
///
/// # Errors
/// `Unsupported`.
pub(super) fn check(graph: &Graph) -> Result<()> {
    let sizes = expanded_sizes(graph);
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
    if sum > EXPANDED_SIZE_MAX {
        let text = "the objects of the file refer to each other so often that making them would take more than";
        return Err(Error::unsupported(format!("{text} {EXPANDED_SIZE_MAX} steps")));
    }
    Ok(())
}

/// Returns the number of objects of each node without sharing. Hashable nodes have parts with smaller ids only, so
/// one pass is enough; mutable ones are not hashable.
fn expanded_sizes(graph: &Graph) -> Vec<u32> {
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

/// Whether it may be a tuple subclass. Other hashable objects hash a few attributes.
fn is_tuple(graph: &Graph, object: &Object) -> bool {
    object.make == Make::NewObject || graph.global(object.callable) == Some(("torch", "Size"))
}
