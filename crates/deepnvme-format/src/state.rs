//! The tensors of an archive, by name.
//!
//! A tensor's name is the way to it from the root: the keys of dicts, the indices of lists, the attributes of objects,
//! joined by dots. A flat state dict therefore gives the names that PyTorch users know.

use std::collections::{HashMap, HashSet};

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId, Object};

/// A storage that an archive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The name of its record below `data/`.
    pub key: String,
    /// How many bytes the pickle says that it has.
    pub bytes: u64,
    /// The type of its elements; `None` for an untyped storage.
    pub dtype: Option<Dtype>,
    /// The device that it was on.
    pub location: String,
}

/// A tensor: a view of a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The way to it.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its strides, in elements.
    pub strides: Vec<u64>,
    /// Where it begins in its storage, in elements.
    pub offset: u64,
    /// Which of the storages it views.
    pub storage: usize,
    /// The node that it is.
    pub node: NodeId,
}

impl Tensor {
    /// Elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of its elements.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    /// Whether its elements lie side by side, in order.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected *= size;
            fits
        }) || self.elements() == 0
    }
}

/// What an archive holds.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The storages, in the order in which the pickle names them.
    pub storages: Vec<Storage>,
    /// The tensors, in the order of the containers that they are in. One that is in several places is there several times.
    pub tensors: Vec<Tensor>,
}

/// Most dimensions that a tensor may have.
const DIMS_MAX: usize = 64;

impl State {
    /// Walks a graph.
    ///
    /// # Errors
    /// `Corrupt` for tensors that reach beyond their storage, `Unsupported` for element types that are not known.
    pub fn of(graph: &Graph) -> Result<Self> {
        let mut walk = Walk { graph, state: Self::default(), by_key: HashMap::new(), seen: HashSet::new() };
        let mut todo = vec![(graph.root(), String::new())];
        while let Some((id, name)) = todo.pop() {
            let from = todo.len();
            walk.visit(id, &name, &mut todo)?;
            // What was found first is visited first.
            todo[from..].reverse();
        }
        Ok(walk.state)
    }
}

struct Walk<'a> {
    graph: &'a Graph,
    state: State,
    by_key: HashMap<String, usize>,
    /// Containers that have been entered: each once, whatever refers to it.
    seen: HashSet<NodeId>,
}

type Todo = Vec<(NodeId, String)>;

impl Walk<'_> {
    fn visit(&mut self, id: NodeId, name: &str, todo: &mut Todo) -> Result<()> {
        let graph = self.graph;
        if let Node::Object(object) = graph.node(id) {
            if let Some(tensor) = self.tensor(object, id, name)? {
                self.state.tensors.push(tensor);
                // What follows storage, offset, sizes and strides may be made of tensors: the scales of quantised ones.
                let arguments = graph.tuple(object.arguments).unwrap_or_default().iter().enumerate().skip(4);
                todo.extend(arguments.map(|(index, argument)| (*argument, joined(name, &index.to_string()))));
                return Ok(());
            }
        } else if let Node::Persistent(key) = graph.node(id) {
            self.storage(*key)?;
            return Ok(());
        }
        let is_container = !matches!(graph.node(id), Node::None | Node::Bool(_) | Node::Int(_) | Node::Str(_));
        if !is_container || !self.seen.insert(id) {
            return Ok(());
        }
        match graph.node(id) {
            Node::Tuple(elements) => numbered(name, elements, todo),
            Node::List(elements) | Node::Set(elements) | Node::FrozenSet(elements) => numbered(name, elements, todo),
            Node::Dict(items) => self.keyed(name, items, todo),
            Node::Object(object) => self.enter(object, name, todo),
            _ => {}
        }
        Ok(())
    }

    /// What an object is made of: a parameter is its tensor, anything else its arguments, items and attributes.
    fn enter(&self, object: &Object, name: &str, todo: &mut Todo) {
        let is_rebuilt = self
            .graph
            .global(object.callable)
            .is_some_and(|(module, function)| module == "torch._utils" && function.starts_with("_rebuild_parameter"));
        let arguments = self.graph.tuple(object.arguments).unwrap_or_default();
        if is_rebuilt && let Some(tensor) = arguments.first() {
            todo.push((*tensor, name.to_owned()));
            arguments[1..].iter().for_each(|argument| todo.push((*argument, name.to_owned())));
        } else {
            numbered(name, arguments, todo);
        }
        self.keyed(name, &object.items, todo);
        numbered(name, &object.elements, todo);
        for state in &object.states {
            todo.push((*state, name.to_owned()));
        }
    }

    fn keyed(&self, name: &str, items: &[(NodeId, NodeId)], todo: &mut Todo) {
        for (key, value) in items {
            let part = match self.graph.node(*key) {
                Node::Str(text) => text.to_string(),
                Node::Int(number) => number.to_string(),
                Node::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
                _ => {
                    todo.push((*key, joined(name, "<key>")));
                    "<key>".to_owned()
                }
            };
            todo.push((*value, joined(name, &part)));
        }
    }

    /// The tensor that an object is, if it is one by torch's own functions.
    fn tensor(&mut self, object: &Object, id: NodeId, name: &str) -> Result<Option<Tensor>> {
        let graph = self.graph;
        let Some(("torch._utils", function)) = graph.global(object.callable) else { return Ok(None) };
        let with_storage = ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"];
        if !with_storage.contains(&function) {
            return Ok(None);
        }
        let wrong = |what: &str| Error::corrupt(0, format!("the tensor {name:?} {what}"));
        let arguments = graph.tuple(object.arguments).unwrap_or_default();
        let &[storage, offset, shape, strides, ..] = arguments else { return Err(wrong("has too few arguments")) };
        let Node::Persistent(key) = graph.node(storage) else { return Err(wrong("has no storage")) };
        let storage = self.storage(*key)?;
        let (Some(offset), Some(shape), Some(strides)) =
            (graph.unsigned(offset), graph.unsigned_tuple(shape), graph.unsigned_tuple(strides))
        else {
            return Err(wrong("has a shape that is no row of numbers"));
        };
        if shape.len() != strides.len() || shape.len() > DIMS_MAX {
            return Err(wrong("has as many strides as it has not sizes, or too many"));
        }
        let dtype = match function {
            "_rebuild_tensor_v3" => {
                let global = arguments.get(6).and_then(|dtype| graph.global(*dtype));
                let name = global.filter(|(module, _)| *module == "torch").map(|(_, name)| name);
                name.and_then(Dtype::from_torch)
            }
            _ => self.state.storages[storage].dtype,
        };
        let Some(dtype) = dtype else {
            let text = format!("the tensor {name:?} has an element type that this version of deepnvme does not know");
            return Err(Error::unsupported(format!("{text}; read the file with torch.load")));
        };
        if !fits(&shape, &strides, offset, self.state.storages[storage].bytes / dtype.bytes()) {
            return Err(wrong("reaches beyond its storage"));
        }
        let tensor = Tensor { name: name.to_owned(), dtype, shape, strides, offset, storage, node: id };
        Ok(Some(tensor))
    }

    /// The storage of a persistent id: `("storage", class, key, location, elements)`.
    fn storage(&mut self, id: NodeId) -> Result<usize> {
        let graph = self.graph;
        let storage = storage(graph, id)?;
        if let Some(known) = self.by_key.get(&storage.key) {
            let known_bytes = self.state.storages[*known].bytes;
            if known_bytes != storage.bytes {
                let what = format!(
                    "the storage {:?} has {known_bytes} bytes in one place and {} in another",
                    storage.key, storage.bytes
                );
                return Err(Error::corrupt(0, what));
            }
            return Ok(*known);
        }
        let index = self.state.storages.len();
        self.by_key.insert(storage.key.clone(), index);
        self.state.storages.push(storage);
        Ok(index)
    }
}

/// What a persistent id says of a storage.
///
/// # Errors
/// `Corrupt` for an id that is none of a storage.
pub fn storage(graph: &Graph, id: NodeId) -> Result<Storage> {
    let wrong = || Error::corrupt(0, "the pickle refers to something outside that is no storage");
    let Some(&[kind, class, key, location, elements]) = graph.tuple(id) else { return Err(wrong()) };
    let kind = graph.text(kind);
    let (Some("storage"), Some((module, class))) = (kind, graph.global(class)) else { return Err(wrong()) };
    let (Some(key), Some(location), Some(elements)) = (graph.text(key), graph.text(location), graph.unsigned(elements))
    else {
        return Err(wrong());
    };
    let dtype = match (module, class) {
        ("torch.storage" | "torch", "UntypedStorage") => None,
        (_, class) => match Dtype::from_storage_class(class) {
            Some(dtype) => Some(dtype),
            None => {
                let text = format!("the storage class {module}.{class} is not known; read the file with torch.load");
                return Err(Error::unsupported(text));
            }
        },
    };
    let bytes = elements.checked_mul(dtype.map_or(1, Dtype::bytes)).ok_or_else(wrong)?;
    Ok(Storage { key: key.to_owned(), bytes, dtype, location: location.to_owned() })
}

fn joined(name: &str, part: &str) -> String {
    if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") }
}

fn numbered(name: &str, elements: &[NodeId], todo: &mut Todo) {
    todo.extend(elements.iter().enumerate().map(|(index, element)| (*element, joined(name, &index.to_string()))));
}

/// Whether every element of a view lies in a storage of that many.
#[must_use]
pub fn fits(shape: &[u64], strides: &[u64], offset: u64, elements: u64) -> bool {
    // What has no elements still has a product of sizes that must not overflow for those who multiply.
    let Some(count) = shape.iter().try_fold(1u64, |product, size| product.checked_mul((*size).max(1))) else {
        return false;
    };
    if count > i64::MAX.unsigned_abs() {
        return false;
    }
    if shape.contains(&0) {
        return true;
    }
    let last = shape.iter().zip(strides).try_fold(offset, |last, (size, stride)| {
        (size - 1).checked_mul(*stride).and_then(|step| last.checked_add(step))
    });
    last.is_some_and(|last| last < elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_stay_within_their_storage() {
        assert!(fits(&[2, 3], &[3, 1], 0, 6));
        assert!(!fits(&[2, 3], &[3, 1], 1, 6));
        assert!(fits(&[], &[], 5, 6));
        assert!(!fits(&[], &[], 6, 6));
        assert!(fits(&[0, 7], &[7, 1], 100, 0));
        assert!(fits(&[4], &[0], 5, 6));
        assert!(!fits(&[u64::MAX], &[u64::MAX], 0, 6));
        assert!(!fits(&[u64::MAX, 0, 3], &[1, 1, 1], 0, 6));
        assert!(!fits(&[2], &[u64::MAX], 1, 6));
    }
}
