//! Pickles as data: the object graph of a pickle, without creating the objects.
//!
//! A pickle is a program, and Python's unpickler calls whatever the file names. Here a call becomes a node, and the
//! code that creates objects from the graph decides what may be called. `opcodes` lists the instructions, `machine`
//! interprets them (`input` reads operands, `surrogates` recognises strings that are not UTF-8), `graph` is the result,
//! `expansion` refuses small graphs that expand to huge objects, and `writer` writes pickles.
//!
//! Format: `Lib/pickletools.py` of CPython, protocols 2 to 5.

mod expansion;
mod graph;
mod input;
mod machine;
mod opcodes;
mod surrogates;
mod writer;

pub use graph::{Graph, Make, Node, NodeId, Object};
pub use machine::{PICKLE_BYTES_MAX, parse};
pub use writer::{PickleWriter, TensorView};
