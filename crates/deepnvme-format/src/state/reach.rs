//! The nodes of a graph that lead to tensors.

use super::tensor;
use crate::pickle::{Graph, Node, NodeId};

/// Whether each node leads to a tensor.
pub(super) struct Reach(Vec<bool>);

impl Reach {
    /// Follows all references backwards from the tensors, in time and memory proportional to the references.
    pub(super) fn of(graph: &Graph) -> Self {
        // The references to each node, one after the other: where those of a node begin, and the nodes that refer to
        // it.
        let mut begins = vec![0u32; graph.len() + 1];
        for (_, node) in numbered(graph) {
            parts(node, |part| begins[part.index() + 1] += 1);
        }
        for index in 1..begins.len() {
            begins[index] += begins[index - 1];
        }
        let mut next = begins.clone();
        let mut users = vec![0u32; begins[graph.len()] as usize];
        for (index, node) in numbered(graph) {
            parts(node, |part| {
                users[next[part.index()] as usize] = index as u32;
                next[part.index()] += 1;
            });
        }
        let mut reach = vec![false; graph.len()];
        let mut todo: Vec<u32> = Vec::new();
        for (index, node) in numbered(graph) {
            if let Node::Object(object) = node
                && tensor::call(graph, object).is_some()
            {
                reach[index] = true;
                todo.push(index as u32);
            }
        }
        while let Some(index) = todo.pop() {
            let range = begins[index as usize] as usize..begins[index as usize + 1] as usize;
            for user in &users[range] {
                if !std::mem::replace(&mut reach[*user as usize], true) {
                    todo.push(*user);
                }
            }
        }
        Self(reach)
    }

    pub(super) fn leads_to_tensors(&self, id: NodeId) -> bool {
        self.0[id.index()]
    }
}

fn numbered(graph: &Graph) -> impl Iterator<Item = (usize, &Node)> {
    graph.nodes().iter().enumerate()
}

/// Calls `each` with the parts of a node.
fn parts(node: &Node, mut each: impl FnMut(NodeId)) {
    match node {
        Node::Tuple(elements) => elements.iter().copied().for_each(each),
        Node::List(elements) | Node::Set(elements) | Node::FrozenSet(elements) => {
            elements.iter().copied().for_each(each);
        }
        Node::Dict(items) => items.iter().flat_map(|(key, value)| [*key, *value]).for_each(each),
        Node::Object(object) => {
            each(object.arguments);
            object.keywords.into_iter().for_each(&mut each);
            object.items.iter().flat_map(|(key, value)| [*key, *value]).for_each(&mut each);
            object.elements.iter().chain(&object.states).copied().for_each(each);
        }
        _ => {}
    }
}
