//! Select the wanted tensors of a state. Values that contain tensors, but no wanted ones, are omitted.
//!
//! Names are sorted so that all names below a prefix are adjacent. A place in the state is therefore a range of names.
//! Each step down narrows the range by binary search, and an empty range ends the search.

use std::cmp::Ordering;

use deepnvme_format::pickle::{Graph, Node, NodeId, Object};
use deepnvme_format::state::State;

use super::callables::PLAIN;

/// Sorted names, all and wanted.
pub(super) struct Choice<'a> {
    tensors: Vec<&'a [u8]>,
    wanted: Vec<&'a [u8]>,
    /// For each node, whether it leads to a storage or to an object that is not a plain value.
    made: Vec<bool>,
}

/// A place in the state: the names that start with its own name.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    tensors: NameRange,
    wanted: NameRange,
    /// Length of its own name in bytes.
    bytes: usize,
}

#[derive(Clone, Copy, Default)]
struct NameRange {
    begin: usize,
    end: usize,
}

impl<'a> Choice<'a> {
    pub(super) fn new(graph: &Graph, state: &'a State, wanted: &'a [String]) -> Self {
        Self {
            made: made(graph),
            tensors: sorted(state.tensors.iter().map(|tensor| tensor.name.as_bytes()).collect()),
            wanted: sorted(wanted.iter().map(String::as_bytes).collect()),
        }
    }

    pub(super) fn root(&self) -> Place {
        let whole = |names: &[&[u8]]| NameRange { begin: 0, end: names.len() };
        Place { tensors: whole(&self.tensors), wanted: whole(&self.wanted), bytes: 0 }
    }

    /// Return the place one step below. Name parts are joined by dots, and empty leading parts are dropped.
    pub(super) fn below(&self, place: Place, part: &str) -> Place {
        if place.bytes == 0 && part.is_empty() {
            return place;
        }
        let step = Step { from: place.bytes, has_dot: place.bytes > 0, part: part.as_bytes() };
        Place {
            tensors: step.narrow(&self.tensors, place.tensors),
            wanted: step.narrow(&self.wanted, place.wanted),
            bytes: place.bytes + usize::from(step.has_dot) + part.len(),
        }
    }

    /// Return whether the place contains tensors, but no wanted ones.
    pub(super) fn leaves_out(&self, place: Place) -> bool {
        !place.tensors.is_empty() && place.wanted.is_empty()
    }

    /// Return whether a value contains no wanted tensors and is not plain. Such values are never built.
    pub(super) fn leaves_out_value(&self, place: Place, id: NodeId) -> bool {
        place.wanted.is_empty() && self.made[id.index()]
    }

    /// Like `leaves_out`, for an object. If it is a tensor, names below its own don't count: it is not built for them.
    pub(super) fn leaves_out_object(&self, place: Place) -> bool {
        // The shortest name comes first.
        let has = |names: &[&[u8]], range: NameRange| {
            names[range.begin..range.end].first().is_some_and(|name| name.len() == place.bytes)
        };
        if has(&self.tensors, place.tensors) { !has(&self.wanted, place.wanted) } else { self.leaves_out(place) }
    }
}

impl NameRange {
    fn is_empty(self) -> bool {
        self.begin == self.end
    }
}

struct Step<'a> {
    from: usize,
    has_dot: bool,
    part: &'a [u8],
}

impl Step<'_> {
    fn narrow(&self, names: &[&[u8]], range: NameRange) -> NameRange {
        let names = &names[range.begin..range.end];
        let begin = names.partition_point(|name| self.side(name) == Ordering::Less);
        let end = begin + names[begin..].partition_point(|name| self.side(name) == Ordering::Equal);
        NameRange { begin: range.begin + begin, end: range.begin + end }
    }

    /// Compare a name with the names that take this step: before, among, or after them.
    fn side(&self, name: &[u8]) -> Ordering {
        let mut rest = &name[self.from..];
        if self.has_dot {
            rest = match rest.split_first() {
                None => return Ordering::Less,
                Some((b'.', rest)) => rest,
                Some(_) => return Ordering::Greater,
            };
        }
        let (head, tail) = rest.split_at(rest.len().min(self.part.len()));
        match in_order(head, self.part) {
            Ordering::Equal if matches!(tail.first(), None | Some(b'.')) => Ordering::Equal,
            Ordering::Equal => Ordering::Greater,
            other => other,
        }
    }
}

/// Find the nodes that lead to a storage, a call that is not plain, or a class.
fn made(graph: &Graph) -> Vec<bool> {
    // The referrers of each node: count them first, then turn the counts into offsets of one array.
    let mut begins = vec![0u32; graph.len() + 1];
    for node in graph.nodes() {
        node.refers_to(&mut |id| begins[id.index() + 1] += 1);
    }
    for at in 1..begins.len() {
        begins[at] += begins[at - 1];
    }
    let mut referrers = vec![0u32; begins.last().copied().unwrap_or(0) as usize];
    let mut ends = begins.clone();
    for (number, node) in graph.nodes().iter().enumerate() {
        node.refers_to(&mut |id| {
            referrers[ends[id.index()] as usize] = number as u32;
            ends[id.index()] += 1;
        });
    }
    let is_plain = |object: &Object| graph.global(object.callable).is_some_and(|global| PLAIN.contains(&global));
    let mut made: Vec<bool> = graph
        .nodes()
        .iter()
        .map(|node| match node {
            Node::Persistent(_) => true,
            Node::Object(object) => !is_plain(object),
            _ => false,
        })
        .collect();
    let mut todo: Vec<u32> = (0..graph.len() as u32).filter(|number| made[*number as usize]).collect();
    while let Some(number) = todo.pop() {
        let at = number as usize;
        for referrer in &referrers[begins[at] as usize..begins[at + 1] as usize] {
            if !std::mem::replace(&mut made[*referrer as usize], true) {
                todo.push(*referrer);
            }
        }
    }
    made
}

fn sorted(mut names: Vec<&[u8]>) -> Vec<&[u8]> {
    names.sort_unstable_by(|left, right| in_order(left, right));
    names
}

/// Sort dots first, so that the names below a name follow it directly.
fn in_order(left: &[u8], right: &[u8]) -> Ordering {
    let rank = |byte: &u8| if *byte == b'.' { 0 } else { u16::from(*byte) + 1 };
    left.iter().map(rank).cmp(right.iter().map(rank))
}
