//! Which of a state's tensors are wanted. What has tensors, but none of those, is left out.
//!
//! Names are sorted so that all below one are neighbours, and a place in the state is the stretch of names below it: a step
//! down narrows the stretch by a binary search, and where there are no names left there is nothing to look at.

use std::cmp::Ordering;

use deepnvme_format::pickle::{Graph, Node, NodeId, Object};
use deepnvme_format::state::State;

use super::callables::PLAIN;

/// Names in order, and those of them that are wanted.
pub(super) struct Choice<'a> {
    tensors: Vec<&'a [u8]>,
    wanted: Vec<&'a [u8]>,
    /// Which nodes lead to a storage, or to an object that is more than a plain value.
    made: Vec<bool>,
}

/// A place in the state: the names that begin with its own.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    tensors: Stretch,
    wanted: Stretch,
    /// Bytes of its own name.
    bytes: usize,
}

#[derive(Clone, Copy, Default)]
struct Stretch {
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
        let whole = |names: &[&[u8]]| Stretch { begin: 0, end: names.len() };
        Place { tensors: whole(&self.tensors), wanted: whole(&self.wanted), bytes: 0 }
    }

    /// The place one step below, by the rules of names: parts are joined by dots, and empty ones at the beginning are none.
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

    /// Whether there are tensors, and none of them is wanted.
    pub(super) fn leaves_out(&self, place: Place) -> bool {
        !place.tensors.is_empty() && place.wanted.is_empty()
    }

    /// Whether a value has no wanted tensors, and would be more than plain values: nothing is made that nobody asked for.
    pub(super) fn leaves_out_value(&self, place: Place, id: NodeId) -> bool {
        place.wanted.is_empty() && self.made[id.index()]
    }

    /// The same of an object: where that is a tensor, those below its name do not count, since it cannot be made for them.
    pub(super) fn leaves_out_object(&self, place: Place) -> bool {
        // The shortest name comes first.
        let has = |names: &[&[u8]], stretch: Stretch| {
            names[stretch.begin..stretch.end].first().is_some_and(|name| name.len() == place.bytes)
        };
        if has(&self.tensors, place.tensors) { !has(&self.wanted, place.wanted) } else { self.leaves_out(place) }
    }
}

impl Stretch {
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
    fn narrow(&self, names: &[&[u8]], stretch: Stretch) -> Stretch {
        let names = &names[stretch.begin..stretch.end];
        let begin = names.partition_point(|name| self.side(name) == Ordering::Less);
        let end = begin + names[begin..].partition_point(|name| self.side(name) == Ordering::Equal);
        Stretch { begin: stretch.begin + begin, end: stretch.begin + end }
    }

    /// Whether a name stands before those that go this way, among them, or behind.
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

/// Which nodes lead to a storage, to a call that is not plain, or to a class.
fn made(graph: &Graph) -> Vec<bool> {
    // Who refers to each node: first how many do, then where their numbers begin in one row.
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

/// Dots come first, so that nothing stands between a name and those below it.
fn in_order(left: &[u8], right: &[u8]) -> Ordering {
    let rank = |byte: &u8| if *byte == b'.' { 0 } else { u16::from(*byte) + 1 };
    left.iter().map(rank).cmp(right.iter().map(rank))
}
