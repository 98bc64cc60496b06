//! Walks a graph from the root to every tensor.
//!
//! A container in several places is visited for each, if it has tensors: they have a name for each. Within itself it is
//! not visited again. Work per reference (a step, another visit, a tensor in several places) is limited.

use std::collections::HashMap;

use super::paths::{PathId, PathPart, Paths};
use super::reach::Reach;
use super::storage::{Storage, storage};
use super::tensor::{self, Tensor};
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId, Object};

/// The maximum number of references to containers and tensors that are followed.
pub const STEPS_MAX: usize = 1 << 25;
/// The maximum number of visits of containers that were visited before. Forty lists, each of which contains the one
/// before it twice, have a million million names.
pub const REVISITS_MAX: usize = 1 << 19;
/// The maximum memory of tensors and storages, names included: millions of them.
pub const STATE_BYTES_MAX: usize = 512 << 20;

/// The contents of an archive.
#[derive(Clone, Debug, Default)]
pub struct PickledState {
    /// The storages, in the pickle's order.
    pub storages: Vec<Storage>,
    /// The tensors, in the order of their containers. A tensor in several places is listed for each.
    pub tensors: Vec<Tensor>,
}

impl PickledState {
    /// Walks a graph.
    ///
    /// # Errors
    /// `Corrupt` for malformed tensors and storages, and for tensors that exceed their storage; `Unsupported` for
    /// unknown element types and storage classes, and for graphs beyond [`DIMS_MAX`](crate::DIMS_MAX),
    /// [`DEPTH_MAX`](super::DEPTH_MAX), [`NAME_BYTES_MAX`](super::NAME_BYTES_MAX), [`STEPS_MAX`], [`REVISITS_MAX`] or
    /// [`STATE_BYTES_MAX`].
    pub fn of(graph: &Graph) -> Result<Self> {
        Walk::new(graph, Limits::default()).run()
    }
}

/// Limits of a walk.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) steps: usize,
    pub(super) revisits: usize,
    pub(super) state_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { steps: STEPS_MAX, revisits: REVISITS_MAX, state_bytes: STATE_BYTES_MAX }
    }
}

#[derive(Clone, Copy)]
struct Step {
    id: NodeId,
    above: PathId,
    part: PathPart,
}

pub(super) struct Walk<'a> {
    graph: &'a Graph,
    limits: Limits,
    paths: Paths<'a>,
    todo: Vec<Step>,
    steps: usize,
    state: PickledState,
    state_bytes: usize,
    by_key: HashMap<String, usize>,
    /// Parsed persistent ids, by node.
    by_id: HashMap<NodeId, usize>,
    /// The visited nodes.
    seen: Vec<bool>,
    /// Which nodes lead to tensors. Computed for the first node that is in several places.
    reach: Option<Reach>,
    revisits: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(graph: &'a Graph, limits: Limits) -> Self {
        Self {
            graph,
            limits,
            paths: Paths::new(graph),
            todo: vec![Step { id: graph.root(), above: Paths::ROOT, part: PathPart::Same }],
            steps: 0,
            state: PickledState::default(),
            state_bytes: 0,
            by_key: HashMap::new(),
            by_id: HashMap::new(),
            seen: vec![false; graph.len()],
            reach: None,
            revisits: 0,
        }
    }

    pub(super) fn run(mut self) -> Result<PickledState> {
        while let Some(step) = self.todo.pop() {
            let from = self.todo.len();
            self.visit(step)?;
            // Visit in the order of discovery.
            self.todo[from..].reverse();
        }
        Ok(self.state)
    }

    fn visit(&mut self, step: Step) -> Result<()> {
        let graph = self.graph;
        match graph.node(step.id) {
            Node::Object(object) => {
                if let Some(call) = tensor::call(graph, object) {
                    return self.tensor(object, &call, step);
                }
            }
            Node::Persistent(key) => return self.storage(*key).map(drop),
            _ => {}
        }
        if !self.enter(step.id, step.above)? {
            return Ok(());
        }
        match graph.node(step.id) {
            Node::Tuple(elements) => self.numbered(step, elements),
            Node::List(elements) | Node::Set(elements) | Node::FrozenSet(elements) => self.numbered(step, elements),
            Node::Dict(items) => self.keyed(step, items),
            Node::Object(object) => self.object(step, object),
            _ => Ok(()),
        }
    }

    /// Marks a node below a path as visited. Returns whether to visit it: for the first time, or again for other names.
    fn enter(&mut self, id: NodeId, above: PathId) -> Result<bool> {
        if !std::mem::replace(&mut self.seen[id.index()], true) {
            return Ok(true);
        }
        let graph = self.graph;
        let reach = self.reach.get_or_insert_with(|| Reach::of(graph));
        if !reach.leads_to_tensors(id) || self.paths.contains(above, id) {
            return Ok(false);
        }
        self.revisits += 1;
        if self.revisits > self.limits.revisits {
            let most = self.limits.revisits;
            let text = format!("the containers of the file refer to each other more than {most} times");
            return Err(Error::unsupported(text));
        }
        Ok(true)
    }

    /// Visits the parts of an object: arguments, items, elements and attributes. A parameter's arguments have its name.
    fn object(&mut self, step: Step, object: &Object) -> Result<()> {
        let graph = self.graph;
        let path = self.paths.below(step.above, step.part, step.id)?;
        let arguments = graph.tuple(object.arguments).unwrap_or_default();
        if self.enter(object.arguments, step.above)? {
            let is_parameter = is_parameter(graph, object);
            for (index, argument) in arguments.iter().enumerate() {
                let part = if is_parameter { PathPart::Same } else { PathPart::Index(index as u32) };
                self.push(*argument, path, part)?;
            }
        }
        if let Some(keywords) = object.keywords {
            self.push(keywords, path, PathPart::Same)?;
        }
        self.items(path, &object.items)?;
        self.elements(path, &object.elements)?;
        object.states.iter().try_for_each(|state| self.push(*state, path, PathPart::Same))
    }

    fn tensor(&mut self, object: &Object, call: &tensor::Call<'_>, step: Step) -> Result<()> {
        let graph = self.graph;
        let name = self.paths.name(step.above, step.part)?;
        let parts = tensor::parts(graph, call, &name)?;
        let storage = self.storage(parts.storage)?;
        let mut tensor = parts.of(name, &self.state.storages[storage], storage)?;
        tensor.is_named = self.paths.is_named(step.above, step.part);
        self.charge(size_of::<Tensor>() + tensor.name.len() + 16 * tensor.view.shape.len())?;
        self.state.tensors.push(tensor);
        // Later arguments may contain tensors, like the scales of quantised ones. So may attributes, which have the
        // tensor's name as prefix.
        let rest = call.arguments.iter().enumerate().skip(tensor::FIXED_ARGUMENTS);
        let attributes = tensor::attributes(graph, object, call);
        let has_more = rest.clone().any(|(_, argument)| is_followed(graph.node(*argument)));
        let has_more = has_more || attributes.is_some_and(|state| is_followed(graph.node(state)));
        // Once only: in hostile files each tensor has the one before twice among its arguments.
        if !has_more || std::mem::replace(&mut self.seen[object.arguments.index()], true) {
            return Ok(());
        }
        let path = self.paths.below(step.above, step.part, step.id)?;
        for (index, argument) in rest {
            self.push(*argument, path, PathPart::Index(index as u32))?;
        }
        attributes.map_or(Ok(()), |state| self.push(state, path, PathPart::Same))
    }

    /// Returns the index of the storage of a persistent id.
    fn storage(&mut self, id: NodeId) -> Result<usize> {
        if let Some(known) = self.by_id.get(&id) {
            return Ok(*known);
        }
        let storage = storage(self.graph, id)?;
        let next = self.state.storages.len();
        let index = *self.by_key.entry(storage.key.clone()).or_insert(next);
        if index == next {
            self.charge(size_of::<Storage>() + 2 * storage.key.len() + storage.location.len())?;
            self.state.storages.push(storage);
        } else if self.state.storages[index].bytes != storage.bytes {
            let (key, bytes, known_bytes) = (storage.key, storage.bytes, self.state.storages[index].bytes);
            let what = format!("the storage {key:?} has {known_bytes} bytes in one place and {bytes} in another");
            return Err(Error::corrupt(0, what));
        }
        self.by_id.insert(id, index);
        Ok(index)
    }

    fn numbered(&mut self, step: Step, elements: &[NodeId]) -> Result<()> {
        let path = self.paths.below(step.above, step.part, step.id)?;
        self.elements(path, elements)
    }

    fn elements(&mut self, path: PathId, elements: &[NodeId]) -> Result<()> {
        let mut numbered = elements.iter().enumerate();
        numbered.try_for_each(|(index, element)| self.push(*element, path, PathPart::Index(index as u32)))
    }

    fn keyed(&mut self, step: Step, items: &[(NodeId, NodeId)]) -> Result<()> {
        let path = self.paths.below(step.above, step.part, step.id)?;
        self.items(path, items)
    }

    fn items(&mut self, path: PathId, items: &[(NodeId, NodeId)]) -> Result<()> {
        for (key, value) in items {
            self.push(*key, path, PathPart::Key(*key))?;
            self.push(*value, path, PathPart::Key(*key))?;
        }
        Ok(())
    }

    fn push(&mut self, id: NodeId, above: PathId, part: PathPart) -> Result<()> {
        if !is_followed(self.graph.node(id)) {
            return Ok(());
        }
        self.steps += 1;
        if self.steps > self.limits.steps {
            let most = self.limits.steps;
            let text = format!("the file refers more than {most} times to its tensors and containers");
            return Err(Error::unsupported(text));
        }
        self.todo.push(Step { id, above, part });
        Ok(())
    }

    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.state_bytes += bytes;
        if self.state_bytes > self.limits.state_bytes {
            let most = self.limits.state_bytes;
            let text = format!("the names and shapes of the file's tensors have more than {most} bytes");
            return Err(Error::unsupported(text));
        }
        Ok(())
    }
}

/// Whether a node may contain tensors or is a storage.
fn is_followed(node: &Node) -> bool {
    match node {
        Node::Tuple(elements) => !elements.is_empty(),
        Node::List(elements) | Node::Set(elements) | Node::FrozenSet(elements) => !elements.is_empty(),
        Node::Dict(items) => !items.is_empty(),
        Node::Persistent(_) | Node::Object(_) => true,
        _ => false,
    }
}

/// Whether an object is a parameter, which has the name of its tensor.
pub(super) fn is_parameter(graph: &Graph, object: &Object) -> bool {
    let global = graph.global(object.callable);
    global.is_some_and(|(module, function)| module == "torch._utils" && function.starts_with("_rebuild_parameter"))
}
