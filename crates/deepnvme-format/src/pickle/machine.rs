//! Interprets a pickle's instructions and builds the graph.
//!
//! Time and memory are linear in the pickle's length: an instruction creates at most three nodes and no more nodes
//! than it has bytes, and lengths beyond the end are errors.

use std::collections::HashMap;

use super::graph::{Graph, Make, Node, NodeId, Object};
use super::input::Input;
use super::{expansion, opcodes as op, surrogates};
use crate::error::{Error, Result};

/// The maximum length of a pickle: far more than the largest model's names need.
pub const PICKLE_BYTES_MAX: u64 = 256 << 20;
/// The maximum length of an integer in bytes: twice as many digits as Python converts from text.
const LONG_INT_BYTES_MAX: usize = 4096;

/// The objects of a pickle may take this memory, here and in Python, or [`OBJECT_BYTES_FACTOR`] times the pickle's
/// length if that is more. A list of large integers takes sixteen times the length of its instructions, an empty list a
/// hundred times.
const OBJECT_BYTES_MIN: u64 = 768 << 20;
const OBJECT_BYTES_FACTOR: u64 = 20;
/// Memory of an element of a list or a set, and of an item of a dict, here and in Python.
const ELEMENT_BYTES: usize = 12;
const ITEM_BYTES: usize = 108;
/// Bytes of memory for each byte of a pickle: a node, a stack slot, and spare capacity of vectors.
const MEMORY_FACTOR: usize = 64;

/// Parses a pickle of protocol 2 to 5.
///
/// # Errors
/// `Corrupt` for bytes that are not a pickle; `Unsupported` for one that is too long, makes objects that take too much
/// memory or time, or has instructions that `torch.save` does not write; `Memory` if there is too little for the graph.
pub fn parse(bytes: &[u8]) -> Result<Graph> {
    if bytes.len() as u64 > PICKLE_BYTES_MAX {
        let text = format!("the pickle has {} bytes; at most {PICKLE_BYTES_MAX} are read", bytes.len());
        return Err(Error::unsupported(text));
    }
    Error::check_memory("the objects of the pickle", bytes.len(), MEMORY_FACTOR)?;
    parse_within(bytes, OBJECT_BYTES_MIN.max(OBJECT_BYTES_FACTOR * bytes.len() as u64))
}

fn parse_within(bytes: &[u8], bytes_max: u64) -> Result<Graph> {
    let mut machine = Machine { input: Input::new(bytes), bytes_max, ..Machine::default() };
    let root = machine.run()?;
    let graph = Graph { nodes: machine.nodes, root };
    expansion::check(&graph)?;
    Ok(graph)
}

#[derive(Default)]
struct Machine<'a> {
    input: Input<'a>,
    nodes: Vec<Node>,
    /// Memory of the objects, here and in Python.
    bytes: u64,
    bytes_max: u64,
    stack: Vec<NodeId>,
    /// Height of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u32, NodeId>,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<NodeId> {
        loop {
            let code = self.input.instruction()?;
            if code == op::STOP {
                return self.pop();
            }
            self.step(code)?;
        }
    }

    fn step(&mut self, code: u8) -> Result<()> {
        match code {
            op::PROTO => {
                let version = self.input.byte()?;
                if version > 5 {
                    return Err(Error::unsupported(format!("the pickle has protocol {version}; 2 to 5 are read")));
                }
            }
            op::FRAME => drop(self.input.take(8)?),
            op::NONE => self.push(Node::None)?,
            op::NEWTRUE => self.push(Node::Bool(true))?,
            op::NEWFALSE => self.push(Node::Bool(false))?,
            op::BININT | op::BININT1 | op::BININT2 | op::LONG1 | op::LONG4 | op::BINFLOAT => self.number(code)?,
            op::BINUNICODE | op::SHORT_BINUNICODE | op::BINUNICODE8 => {
                let bytes = match code {
                    op::SHORT_BINUNICODE => self.input.counted(1)?,
                    op::BINUNICODE => self.input.counted(4)?,
                    _ => self.input.counted(8)?,
                };
                let node = match std::str::from_utf8(bytes) {
                    Ok(text) => Node::Str(text.into()),
                    Err(_) if surrogates::are_text(bytes) => Node::Surrogates(bytes.into()),
                    Err(_) => return Err(self.input.error("has a text that is not UTF-8")),
                };
                self.push(node)?;
            }
            op::SHORT_BINSTRING | op::SHORT_BINBYTES => self.bytes_node(1)?,
            op::BINSTRING | op::BINBYTES => self.bytes_node(4)?,
            op::BINBYTES8 => self.bytes_node(8)?,
            op::BYTEARRAY8 => {
                let bytes = self.input.counted(8)?.into();
                self.push(Node::ByteArray(bytes))?;
            }
            op::EMPTY_TUPLE => self.push(Node::Tuple(Box::default()))?,
            op::TUPLE1 | op::TUPLE2 | op::TUPLE3 => {
                let elements = self.pop_many(usize::from(code - op::TUPLE1) + 1)?;
                self.push(Node::Tuple(elements.into()))?;
            }
            op::TUPLE => {
                let elements = self.pop_mark()?;
                self.push(Node::Tuple(elements.into()))?;
            }
            op::EMPTY_LIST => self.push(Node::List(Vec::new()))?,
            op::EMPTY_DICT => self.push(Node::Dict(Vec::new()))?,
            op::EMPTY_SET => self.push(Node::Set(Vec::new()))?,
            op::FROZENSET => {
                let elements = self.pop_mark()?;
                self.push(Node::FrozenSet(elements))?;
            }
            op::MARK => self.marks.push(self.stack.len()),
            op::POP => drop(self.pop()?),
            op::POP_MARK => drop(self.pop_mark()?),
            op::DUP => {
                let top = self.top()?;
                self.stack.push(top);
            }
            op::APPEND | op::APPENDS | op::ADDITEMS => {
                let elements = if code == op::APPEND { self.pop_many(1)? } else { self.pop_mark()? };
                self.extend(elements)?;
            }
            op::SETITEM | op::SETITEMS => {
                let elements = if code == op::SETITEM { self.pop_many(2)? } else { self.pop_mark()? };
                self.set_items(&elements)?;
            }
            op::BINPUT | op::LONG_BINPUT | op::MEMOIZE => {
                let index = match code {
                    op::BINPUT => self.input.byte()?.into(),
                    op::LONG_BINPUT => self.input.u32()?,
                    _ => self.memo.len() as u32,
                };
                let top = self.top()?;
                self.memo.insert(index, top);
            }
            op::BINGET | op::LONG_BINGET => {
                let index = if code == op::BINGET { self.input.byte()?.into() } else { self.input.u32()? };
                let Some(node) = self.memo.get(&index) else {
                    return Err(self.input.error("refers to an object that is not there"));
                };
                self.stack.push(*node);
            }
            op::GLOBAL => {
                let (module, name) = (self.input.line()?, self.input.line()?);
                let (module, name) = (self.make(Node::Str(module))?, self.make(Node::Str(name))?);
                self.push(Node::Global(module, name))?;
            }
            op::STACK_GLOBAL => {
                let names = self.pop_many(2)?;
                if names.iter().any(|id| !matches!(self.nodes[id.index()], Node::Str(_))) {
                    return Err(self.input.error("names a global by something else than texts"));
                }
                self.push(Node::Global(names[0], names[1]))?;
            }
            op::BINPERSID => {
                let key = self.pop()?;
                self.push(Node::Persistent(key))?;
            }
            op::REDUCE | op::NEWOBJ | op::NEWOBJ_EX => self.object(code)?,
            op::BUILD => {
                let state = self.pop()?;
                let top = self.top()?;
                match &mut self.nodes[top.index()] {
                    Node::Object(object) => object.states.push(state),
                    _ => return Err(self.input.error("gives a state to something that has none")),
                }
            }
            _ => return Err(self.input.unknown(code)),
        }
        Ok(())
    }

    fn number(&mut self, code: u8) -> Result<()> {
        let node = match code {
            op::BININT => Node::Int(i64::from(self.input.u32()?.cast_signed())),
            op::BININT1 => Node::Int(self.input.byte()?.into()),
            op::BININT2 => Node::Int(u16::from_le_bytes(self.input.array()?).into()),
            op::BINFLOAT => Node::Float(f64::from_be_bytes(self.input.array()?)),
            op::LONG1 => integer(self.input.counted(1)?),
            op::LONG4 => integer(self.input.counted(4)?),
            _ => return Err(self.input.unknown(code)),
        };
        if matches!(&node, Node::LongInt(bytes) if bytes.len() > LONG_INT_BYTES_MAX) {
            return Err(self.input.error("has an integer of absurd length"));
        }
        self.push(node)
    }

    fn object(&mut self, code: u8) -> Result<()> {
        let keywords = if code == op::NEWOBJ_EX { Some(self.pop()?) } else { None };
        let parts = self.pop_many(2)?;
        let make = if code == op::REDUCE { Make::Call } else { Make::NewObject };
        if !matches!(self.nodes[parts[1].index()], Node::Tuple(_)) {
            return Err(self.input.error("calls something with arguments that are not a tuple"));
        }
        self.push(Node::Object(Box::new(Object {
            make,
            callable: parts[0],
            arguments: parts[1],
            keywords,
            items: Vec::new(),
            elements: Vec::new(),
            states: Vec::new(),
        })))
    }

    fn extend(&mut self, elements: Vec<NodeId>) -> Result<()> {
        self.charge(elements.len() * ELEMENT_BYTES)?;
        let top = self.top()?;
        match &mut self.nodes[top.index()] {
            Node::List(list) | Node::Set(list) => list.extend(elements),
            Node::Object(object) => object.elements.extend(elements),
            _ => return Err(self.input.error("appends to something that is not a list")),
        }
        Ok(())
    }

    fn set_items(&mut self, elements: &[NodeId]) -> Result<()> {
        if elements.len() % 2 == 1 {
            return Err(self.input.error("sets a key without a value"));
        }
        self.charge(elements.len() / 2 * ITEM_BYTES)?;
        let pairs = elements.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        let top = self.top()?;
        match &mut self.nodes[top.index()] {
            Node::Dict(items) => items.extend(pairs),
            Node::Object(object) => object.items.extend(pairs),
            _ => return Err(self.input.error("sets items of something that is not a dict")),
        }
        Ok(())
    }

    fn bytes_node(&mut self, width: usize) -> Result<()> {
        let bytes = self.input.counted(width)?.into();
        self.push(Node::Bytes(bytes))
    }

    fn push(&mut self, node: Node) -> Result<()> {
        let id = self.make(node)?;
        self.stack.push(id);
        Ok(())
    }

    fn make(&mut self, node: Node) -> Result<NodeId> {
        self.charge(node_bytes(&node))?;
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        Ok(id)
    }

    /// Counts memory before it is allocated in Python.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.bytes += bytes as u64;
        if self.bytes > self.bytes_max {
            let text = format!("the objects of the pickle would take more than {} bytes of memory", self.bytes_max);
            return Err(Error::unsupported(text));
        }
        Ok(())
    }

    /// Returns the top of the stack above the last mark.
    fn top(&self) -> Result<NodeId> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor..].last().copied().ok_or_else(|| self.input.error("takes more from its stack than there is"))
    }

    fn pop(&mut self) -> Result<NodeId> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<NodeId>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count).filter(|at| *at >= floor) {
            Some(at) => Ok(self.stack.split_off(at)),
            None => Err(self.input.error("takes more from its stack than there is")),
        }
    }

    fn pop_mark(&mut self) -> Result<Vec<NodeId>> {
        match self.marks.pop() {
            Some(at) => Ok(self.stack.split_off(at)),
            None => Err(self.input.error("goes back to a mark that is not there")),
        }
    }
}

/// Parses an integer in little-endian two's complement.
fn integer(bytes: &[u8]) -> Node {
    if bytes.len() > 8 {
        return Node::LongInt(bytes.into());
    }
    let fill = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xff } else { 0 };
    let mut wide = [fill; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    Node::Int(i64::from_le_bytes(wide))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

/// Memory of a new node with the elements that it has so far: the node, and the object that Python makes of it.
fn node_bytes(node: &Node) -> usize {
    let own = match node {
        Node::None | Node::Bool(_) => 0,
        Node::Int(_) | Node::Float(_) => 32,
        Node::Str(text) => 64 + 2 * text.len(),
        Node::LongInt(bytes) | Node::Surrogates(bytes) | Node::Bytes(bytes) | Node::ByteArray(bytes) => {
            64 + 2 * bytes.len()
        }
        Node::Tuple(elements) => 56 + ELEMENT_BYTES * elements.len(),
        Node::List(elements) => 72 + ELEMENT_BYTES * elements.len(),
        Node::Dict(items) => 80 + ITEM_BYTES * items.len(),
        Node::Set(elements) | Node::FrozenSet(elements) => 216 + ELEMENT_BYTES * elements.len(),
        Node::Global(..) | Node::Persistent(_) => 64,
        Node::Object(_) => size_of::<Object>() + 64,
    };
    size_of::<Node>() + size_of::<NodeId>() + own
}
