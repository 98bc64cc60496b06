//! The object graph of a pickle.

use std::borrow::Cow;

use super::surrogates;
use crate::DIMS_MAX;

/// The name component of a key that [has no name](Graph::has_name).
const ODD_KEY: &str = "<key>";

/// Identifies a node of a graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// Returns the index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One object.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// A longer integer: two's complement, the lowest byte first.
    LongInt(Box<[u8]>),
    /// A float.
    Float(f64),
    /// A string.
    Str(Box<str>),
    /// A string with lone surrogates: UTF-8 except for these, which take three bytes each (`surrogatepass` in
    /// Python).
    Surrogates(Box<[u8]>),
    /// Bytes.
    Bytes(Box<[u8]>),
    /// A byte array.
    ByteArray(Box<[u8]>),
    /// A tuple.
    Tuple(Box<[NodeId]>),
    /// A list.
    List(Vec<NodeId>),
    /// A dict: keys and values in insertion order.
    Dict(Vec<(NodeId, NodeId)>),
    /// A set.
    Set(Vec<NodeId>),
    /// A frozen set.
    FrozenSet(Vec<NodeId>),
    /// A class or function: module and name.
    Global(NodeId, NodeId),
    /// A persistent id: in archives, a storage.
    Persistent(NodeId),
    /// The result of a call.
    Object(Box<Object>),
}

impl Node {
    /// Visits the nodes that this one refers to.
    pub fn refers_to(&self, visit: &mut dyn FnMut(NodeId)) {
        let mut pairs = |items: &[(NodeId, NodeId)]| {
            for (key, value) in items {
                visit(*key);
                visit(*value);
            }
        };
        match self {
            Self::Tuple(elements) => elements.iter().for_each(|id| visit(*id)),
            Self::List(elements) | Self::Set(elements) | Self::FrozenSet(elements) => {
                elements.iter().for_each(|id| visit(*id));
            }
            Self::Dict(items) => pairs(items),
            Self::Global(module, name) => [module, name].into_iter().for_each(|id| visit(*id)),
            Self::Persistent(key) => visit(*key),
            Self::Object(object) => {
                pairs(&object.items);
                [object.callable, object.arguments].into_iter().for_each(&mut *visit);
                object.keywords.iter().chain(&object.elements).chain(&object.states).for_each(|id| visit(*id));
            }
            _ => {}
        }
    }
}

/// A call, and the operations on its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// The kind of call.
    pub make: Make,
    /// The class or function.
    pub callable: NodeId,
    /// Arguments: a tuple.
    pub arguments: NodeId,
    /// Keyword arguments: a dict, in rare cases of `NewObject`.
    pub keywords: Option<NodeId>,
    /// Items set on it, as on a dict.
    pub items: Vec<(NodeId, NodeId)>,
    /// Elements appended or added to it.
    pub elements: Vec<NodeId>,
    /// States passed to `__setstate__`, in order.
    pub states: Vec<NodeId>,
}

/// The kind of call that creates an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Make {
    /// `callable(*arguments)`.
    Call,
    /// `callable.__new__(callable, *arguments)`.
    NewObject,
}

/// All objects of a pickle. A shared object is one node; there may be cycles.
#[derive(Clone, Debug)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) root: NodeId,
}

impl Graph {
    /// Returns the pickled object.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Never true: there is a root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns all nodes in the order of their creation.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns a node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Returns module and name if the node is a global.
    #[must_use]
    pub fn global(&self, id: NodeId) -> Option<(&str, &str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((self.text(*module)?, self.text(*name)?)),
            _ => None,
        }
    }

    /// Returns the elements if the node is a tuple.
    #[must_use]
    pub fn tuple(&self, id: NodeId) -> Option<&[NodeId]> {
        match self.node(id) {
            Node::Tuple(elements) => Some(elements),
            _ => None,
        }
    }

    /// Returns the text if the node is a string.
    #[must_use]
    pub fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the name component of a key: `str(key)` in Python for the usual keys. Lone surrogates are escaped, so
    /// that keys that differ in them have different names.
    #[must_use]
    pub fn key_name(&self, key: NodeId) -> Cow<'_, str> {
        match self.node(key) {
            Node::Str(text) => Cow::Borrowed(text),
            Node::Surrogates(bytes) => Cow::Owned(surrogates::escaped(bytes)),
            Node::Int(number) => Cow::Owned(number.to_string()),
            Node::Bool(true) => Cow::Borrowed("True"),
            Node::Bool(false) => Cow::Borrowed("False"),
            Node::None => Cow::Borrowed("None"),
            _ => Cow::Borrowed(ODD_KEY),
        }
    }

    /// Returns whether the key has a name: whether it is text, a whole number of 64 bits, a truth value or `None`.
    #[must_use]
    pub fn has_name(&self, key: NodeId) -> bool {
        matches!(self.node(key), Node::Str(_) | Node::Surrogates(_) | Node::Int(_) | Node::Bool(_) | Node::None)
    }

    /// Returns the number if the node is a non-negative integer.
    #[must_use]
    pub fn unsigned(&self, id: NodeId) -> Option<u64> {
        match self.node(id) {
            Node::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Returns shape or strides if the node is a tuple (or a `torch.Size`) of at most [`DIMS_MAX`] non-negative
    /// integers.
    #[must_use]
    pub fn dimensions(&self, id: NodeId) -> Option<Vec<u64>> {
        let elements = match self.node(id) {
            Node::Tuple(elements) => elements,
            Node::Object(object) if self.global(object.callable) == Some(("torch", "Size")) => {
                let [inner] = self.tuple(object.arguments)? else { return None };
                self.tuple(*inner)?
            }
            _ => return None,
        };
        let elements = Some(elements).filter(|elements| elements.len() <= DIMS_MAX)?;
        elements.iter().map(|element| self.unsigned(*element)).collect()
    }
}
