//! What the objects of a graph would cost those who make them.
//!
//! A graph is never larger than its pickle, but what is made of it may be. A tuple that holds the same tuple twice, which
//! holds the same tuple twice, and so on, has a hundred bytes at sixty levels and a hash that takes Python for ever; a long
//! list, handed to one call after another, is copied by each. So two sizes are computed for every object: what it has
//! when it is `spelled` out (what hashing and comparing look at), and what a call `copies` that gets it. The sum of the first
//! over all references and of the second over all calls has a limit.

use super::graph::{Graph, Make, Node, NodeId, Object};
use crate::error::{Error, Result};

/// The sum that is allowed: about one for each byte of the longest pickle.
pub(super) const COST_MAX: u64 = 1 << 28;
/// How many bytes count as one object.
const WORD_BYTES: usize = 8;

/// Refuses a graph that costs too much.
///
/// # Errors
/// `Unsupported`.
pub(super) fn check(graph: &Graph) -> Result<()> {
    let sizes = Sizes::of(graph);
    let mut sum = 0u64;
    for node in graph.nodes() {
        let mut refer = |id: &NodeId| sum = sum.saturating_add(u64::from(sizes.spelled[id.index()]) - 1);
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
                for handed_over in [Some(object.arguments), object.keywords].into_iter().flatten() {
                    sum = sum.saturating_add(sizes.copied[handed_over.index()].into());
                }
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

/// Both sizes of every node.
struct Sizes {
    spelled: Vec<u32>,
    copied: Vec<u32>,
}

impl Sizes {
    /// Tuples, frozen sets and results of calls have parts with smaller numbers only, so one pass is enough. What can be
    /// changed later has no hash, and is not copied deeply.
    fn of(graph: &Graph) -> Self {
        let mut sizes = Self { spelled: Vec::with_capacity(graph.len()), copied: Vec::with_capacity(graph.len()) };
        for node in graph.nodes() {
            let (spelled, copied) = match node {
                Node::Tuple(elements) => (Self::sum(&sizes.spelled, elements), Self::sum(&sizes.copied, elements)),
                Node::FrozenSet(elements) => (Self::sum(&sizes.spelled, elements), flat(elements.len())),
                Node::List(elements) | Node::Set(elements) => (1, flat(elements.len())),
                Node::Dict(items) => (1, flat(2 * items.len())),
                Node::LongInt(bytes) => (flat(bytes.len() / WORD_BYTES), 1),
                Node::Str(text) => (1, flat(text.len() / WORD_BYTES)),
                Node::Bytes(bytes) | Node::ByteArray(bytes) => (1, flat(bytes.len() / WORD_BYTES)),
                Node::Object(object) => sizes.object(graph, object),
                _ => (1, 1),
            };
            sizes.spelled.push(spelled);
            sizes.copied.push(copied);
        }
        sizes
    }

    fn object(&self, graph: &Graph, object: &Object) -> (u32, u32) {
        let arguments = object.arguments.index();
        let global = graph.global(object.callable);
        // Tuples of a class of their own; all else that is hashable is so by a few attributes.
        let is_tuple = object.make == Make::NewObject || global == Some(("torch", "Size"));
        let spelled = if is_tuple { self.spelled[arguments].saturating_add(1) } else { 1 };
        let held = flat(2 * object.items.len() + object.elements.len());
        // A range is as long as its numbers say, for whoever makes something of it.
        let is_range = matches!(global, Some(("builtins" | "__builtin__", "range" | "xrange")));
        let numbers = graph.tuple(object.arguments).unwrap_or_default().iter().filter(|_| is_range);
        let length = numbers.map(|number| magnitude(graph.node(*number))).fold(0, u32::saturating_add);
        (spelled, self.copied[arguments].saturating_add(held).saturating_add(length))
    }

    fn sum(sizes: &[u32], elements: &[NodeId]) -> u32 {
        elements.iter().fold(1, |sum: u32, element| sum.saturating_add(sizes[element.index()]))
    }
}

fn flat(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX).saturating_add(1)
}

fn magnitude(node: &Node) -> u32 {
    match node {
        Node::Int(number) => u32::try_from(number.unsigned_abs()).unwrap_or(u32::MAX),
        Node::LongInt(_) => u32::MAX,
        _ => 0,
    }
}
