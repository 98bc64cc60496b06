//! The objects that a pickle describes.

use std::borrow::Cow;

use super::surrogates;
use crate::DIMS_MAX;

/// What stands in a name for a key that is neither text nor number.
const ODD_KEY: &str = "<key>";

/// Which node of a graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// As an index.
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
    /// A string with lone surrogates: UTF-8 but for these, which have three bytes each (`surrogatepass` of Python).
    Surrogates(Box<[u8]>),
    /// Bytes.
    Bytes(Box<[u8]>),
    /// A byte array.
    ByteArray(Box<[u8]>),
    /// A tuple.
    Tuple(Box<[NodeId]>),
    /// A list.
    List(Vec<NodeId>),
    /// A dict: keys and values in the order in which they were set.
    Dict(Vec<(NodeId, NodeId)>),
    /// A set.
    Set(Vec<NodeId>),
    /// A frozen set.
    FrozenSet(Vec<NodeId>),
    /// A class or function: the texts of its module and its name.
    Global(NodeId, NodeId),
    /// What the pickle leaves to its reader, by a key: in archives, a storage.
    Persistent(NodeId),
    /// The result of a call.
    Object(Box<Object>),
}

impl Node {
    /// Visits the nodes that this one is made of.
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

/// What a call would make, and what would be done with it afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// How it comes into being.
    pub make: Make,
    /// The class or function.
    pub callable: NodeId,
    /// Its arguments: a tuple.
    pub arguments: NodeId,
    /// Its keyword arguments: a dict, in rare cases of `NewObject`.
    pub keywords: Option<NodeId>,
    /// Items that are set on it, as on a dict.
    pub items: Vec<(NodeId, NodeId)>,
    /// Elements that are appended or added to it.
    pub elements: Vec<NodeId>,
    /// States that are given to it (`__setstate__`), in turn.
    pub states: Vec<NodeId>,
}

/// How an object comes into being.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Make {
    /// `callable(*arguments)`.
    Call,
    /// `callable.__new__(callable, *arguments)`.
    NewObject,
}

/// All objects of a pickle. An object that is referred to from several places is one node; there may be circles.
#[derive(Clone, Debug)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) root: NodeId,
}

impl Graph {
    /// The object that was pickled.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// How many nodes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Never true: there is a root.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// All nodes, in the order in which the pickle makes them.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of that number.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Module and name, where the node is a global.
    #[must_use]
    pub fn global(&self, id: NodeId) -> Option<(&str, &str)> {
        match self.node(id) {
            Node::Global(module, name) => Some((self.text(*module)?, self.text(*name)?)),
            _ => None,
        }
    }

    /// The elements, where the node is a tuple.
    #[must_use]
    pub fn tuple(&self, id: NodeId) -> Option<&[NodeId]> {
        match self.node(id) {
            Node::Tuple(elements) => Some(elements),
            _ => None,
        }
    }

    /// The text, where the node is a string.
    #[must_use]
    pub fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    /// What tensors are called by below a key: the same as `str(key)` in Python for the keys that states have. Lone
    /// surrogates are escaped, so that no two keys have one name for them.
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

    /// The number, where the node is an integer that is not negative.
    #[must_use]
    pub fn unsigned(&self, id: NodeId) -> Option<u64> {
        match self.node(id) {
            Node::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Sizes or strides, where the node is a tuple (or a `torch.Size`) of at most [`DIMS_MAX`] integers that are not negative.
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
