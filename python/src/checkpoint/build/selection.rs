//! Select the wanted tensors of a state. A value without wanted tensors is omitted if it contains other tensors, or if
//! it is not plain.
//!
//! Names are sorted so that all names below a prefix are adjacent. A scope of the state is therefore a range of names.
//! Each step down narrows the range by binary search, and an empty range ends the search.

use std::cmp::Ordering;

use deepnvme_format::pickle::{Graph, Node, NodeId, Object};
use deepnvme_format::state::PickledState;

use super::callables::WITHOUT_TENSOR;

/// Sorted names, all and wanted.
pub(super) struct Selection<'a> {
    tensors: Vec<&'a [u8]>,
    wanted: Vec<&'a [u8]>,
    /// For each node, whether it leads to a storage or to an object that is not a plain value.
    not_plain: Vec<bool>,
}

/// A scope of the state: the names that start with its own name.
#[derive(Clone, Copy, Default)]
pub(super) struct NameScope {
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

impl<'a> Selection<'a> {
    pub(super) fn new(graph: &Graph, state: &'a PickledState, wanted: &'a [String]) -> Self {
        Self {
            not_plain: find_not_plain(graph),
            tensors: sorted(state.tensors.iter().map(|tensor| tensor.name.as_bytes()).collect()),
            wanted: sorted(wanted.iter().map(String::as_bytes).collect()),
        }
    }

    pub(super) fn root(&self) -> NameScope {
        let whole = |names: &[&[u8]]| NameRange { begin: 0, end: names.len() };
        NameScope { tensors: whole(&self.tensors), wanted: whole(&self.wanted), bytes: 0 }
    }

    /// Returns the scope one step below. Name parts are joined by dots, and empty leading parts are dropped.
    pub(super) fn child(&self, scope: NameScope, part: &str) -> NameScope {
        if scope.bytes == 0 && part.is_empty() {
            return scope;
        }
        let step = Step { from: scope.bytes, has_dot: scope.bytes > 0, part: part.as_bytes() };
        NameScope {
            tensors: step.narrow(&self.tensors, scope.tensors),
            wanted: step.narrow(&self.wanted, scope.wanted),
            bytes: scope.bytes + usize::from(step.has_dot) + part.len(),
        }
    }

    /// Returns whether the scope contains tensors, but no wanted ones.
    pub(super) fn excludes(&self, scope: NameScope) -> bool {
        !scope.tensors.is_empty() && scope.wanted.is_empty()
    }

    /// Returns whether a value contains no wanted tensors and is not plain. Such a value is built only as a part of a
    /// wanted object.
    pub(super) fn excludes_value(&self, scope: NameScope, id: NodeId) -> bool {
        scope.wanted.is_empty() && self.not_plain[id.index()]
    }

    /// Like `excludes`, for an object. If it is a tensor, names below its own don't count: it is not built for them.
    pub(super) fn excludes_object(&self, scope: NameScope) -> bool {
        // The shortest name comes first.
        let has = |names: &[&[u8]], range: NameRange| {
            names[range.begin..range.end].first().is_some_and(|name| name.len() == scope.bytes)
        };
        if has(&self.tensors, scope.tensors) { !has(&self.wanted, scope.wanted) } else { self.excludes(scope) }
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

    /// Compares a name with the names that take this step: before, among, or after them.
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

/// Finds the nodes that lead to a storage, or to an object that is not a plain value.
fn find_not_plain(graph: &Graph) -> Vec<bool> {
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
    let makes_no_tensor =
        |object: &Object| graph.global(object.callable).is_some_and(|global| WITHOUT_TENSOR.contains(&global));
    let mut not_plain: Vec<bool> = graph
        .nodes()
        .iter()
        .map(|node| match node {
            Node::Persistent(_) => true,
            Node::Object(object) => !makes_no_tensor(object),
            _ => false,
        })
        .collect();
    let mut todo: Vec<u32> = (0..graph.len() as u32).filter(|number| not_plain[*number as usize]).collect();
    while let Some(number) = todo.pop() {
        let at = number as usize;
        for referrer in &referrers[begins[at] as usize..begins[at + 1] as usize] {
            if !std::mem::replace(&mut not_plain[*referrer as usize], true) {
                todo.push(*referrer);
            }
        }
    }
    not_plain
}

fn sorted(mut names: Vec<&[u8]>) -> Vec<&[u8]> {
    names.sort_unstable_by(|left, right| in_order(left, right));
    names
}

/// Sorts dots first, so that the names below a name follow it directly.
fn in_order(left: &[u8], right: &[u8]) -> Ordering {
    let rank = |byte: &u8| if *byte == b'.' { 0 } else { u16::from(*byte) + 1 };
    left.iter().map(rank).cmp(right.iter().map(rank))
}
