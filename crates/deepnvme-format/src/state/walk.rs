//! The way through a graph, from the root to every tensor, and the state that it finds.
//!
//! Each container is entered once, whatever refers to it, and so are the arguments of calls, which several may share.
//! What is noted for each reference instead (a step, a tensor in several places) is counted against a limit.

use std::collections::HashMap;

use super::names::{Part, WayId, Ways};
use super::storage::{Storage, storage};
use super::tensor::{self, Tensor};
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId, Object};

/// How many references to containers and tensors are followed.
pub const STEPS_MAX: usize = 1 << 25;
/// What tensors and storages may take in memory, names included: millions of them.
pub const STATE_BYTES_MAX: usize = 512 << 20;

/// What an archive holds.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The storages, in the order in which the pickle names them.
    pub storages: Vec<Storage>,
    /// The tensors, in the order of the containers that they are in. One that is in several places is there several times.
    pub tensors: Vec<Tensor>,
}

impl State {
    /// Walks a graph.
    ///
    /// # Errors
    /// `Corrupt` for tensors that reach beyond their storage; `Unsupported` for element types that are not known, and for
    /// graphs beyond [`DEPTH_MAX`](super::DEPTH_MAX), [`NAME_BYTES_MAX`](super::NAME_BYTES_MAX), [`STEPS_MAX`] or
    /// [`STATE_BYTES_MAX`].
    pub fn of(graph: &Graph) -> Result<Self> {
        Walk::new(graph, Limits::default()).run()
    }
}

/// How far a walk may go.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) steps: usize,
    pub(super) state_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { steps: STEPS_MAX, state_bytes: STATE_BYTES_MAX }
    }
}

#[derive(Clone, Copy)]
struct Step {
    id: NodeId,
    above: WayId,
    part: Part,
}

pub(super) struct Walk<'a> {
    graph: &'a Graph,
    limits: Limits,
    ways: Ways<'a>,
    todo: Vec<Step>,
    steps: usize,
    state: State,
    state_bytes: usize,
    by_key: HashMap<String, usize>,
    /// Persistent ids that have been read, by the node of the id.
    by_id: HashMap<NodeId, usize>,
    /// Which nodes have been entered.
    seen: Vec<bool>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(graph: &'a Graph, limits: Limits) -> Self {
        Self {
            graph,
            limits,
            ways: Ways::new(graph),
            todo: vec![Step { id: graph.root(), above: Ways::ROOT, part: Part::Same }],
            steps: 0,
            state: State::default(),
            state_bytes: 0,
            by_key: HashMap::new(),
            by_id: HashMap::new(),
            seen: vec![false; graph.len()],
        }
    }

    pub(super) fn run(mut self) -> Result<State> {
        while let Some(step) = self.todo.pop() {
            let from = self.todo.len();
            self.visit(step)?;
            // What was found first is visited first.
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
        if !self.enter(step.id) {
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

    /// Whether that is the first time.
    fn enter(&mut self, id: NodeId) -> bool {
        !std::mem::replace(&mut self.seen[id.index()], true)
    }

    /// What an object is made of: a parameter is its tensor, anything else its arguments, items and attributes.
    fn object(&mut self, step: Step, object: &Object) -> Result<()> {
        let graph = self.graph;
        let way = self.ways.below(step.above, step.part)?;
        let arguments = graph.tuple(object.arguments).unwrap_or_default();
        if self.enter(object.arguments) {
            let is_parameter = is_parameter(graph, object);
            for (index, argument) in arguments.iter().enumerate() {
                let part = if is_parameter { Part::Same } else { Part::Index(index as u32) };
                self.push(*argument, way, part)?;
            }
        }
        if let Some(keywords) = object.keywords {
            self.push(keywords, way, Part::Same)?;
        }
        self.items(way, &object.items)?;
        self.elements(way, &object.elements)?;
        object.states.iter().try_for_each(|state| self.push(*state, way, Part::Same))
    }

    fn tensor(&mut self, object: &Object, call: &tensor::Call<'_>, step: Step) -> Result<()> {
        let graph = self.graph;
        let name = self.ways.spell(step.above, step.part)?;
        let parts = tensor::parts(graph, call, &name)?;
        let storage = self.storage(parts.storage)?;
        let tensor = parts.of(name, &self.state.storages[storage], storage)?;
        self.charge(size_of::<Tensor>() + tensor.name.len() + 16 * tensor.shape.len())?;
        self.state.tensors.push(tensor);
        // What follows storage, offset, sizes and strides may be made of tensors: the scales of quantised ones.
        // So may the attributes of one that has some, which go by its name.
        let rest = call.arguments.iter().enumerate().skip(tensor::FIXED_ARGUMENTS);
        let attributes = tensor::attributes(graph, object, call);
        let has_more = rest.clone().any(|(_, argument)| is_followed(graph.node(*argument)));
        let has_more = has_more || attributes.is_some_and(|state| is_followed(graph.node(state)));
        if !has_more || !self.enter(object.arguments) {
            return Ok(());
        }
        let way = self.ways.below(step.above, step.part)?;
        for (index, argument) in rest {
            self.push(*argument, way, Part::Index(index as u32))?;
        }
        attributes.map_or(Ok(()), |state| self.push(state, way, Part::Same))
    }

    /// The storage of a persistent id.
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
        let way = self.ways.below(step.above, step.part)?;
        self.elements(way, elements)
    }

    fn elements(&mut self, way: WayId, elements: &[NodeId]) -> Result<()> {
        let mut numbered = elements.iter().enumerate();
        numbered.try_for_each(|(index, element)| self.push(*element, way, Part::Index(index as u32)))
    }

    fn keyed(&mut self, step: Step, items: &[(NodeId, NodeId)]) -> Result<()> {
        let way = self.ways.below(step.above, step.part)?;
        self.items(way, items)
    }

    fn items(&mut self, way: WayId, items: &[(NodeId, NodeId)]) -> Result<()> {
        for (key, value) in items {
            self.push(*key, way, Part::Key(*key))?;
            self.push(*value, way, Part::Key(*key))?;
        }
        Ok(())
    }

    fn push(&mut self, id: NodeId, above: WayId, part: Part) -> Result<()> {
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

/// Whether there may be tensors in it.
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
