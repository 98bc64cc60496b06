//! Pickles as data: the graph of objects that a pickle describes, without making any of them.
//!
//! A pickle is a program, and Python's own reader runs it: it calls whatever the file names. Here the program is only
//! followed. What it would call becomes a node that says so, and whoever makes objects out of the graph decides what may
//! be called. `opcodes` has the instructions, `machine` follows them (`input` has the bytes), `graph` is what comes out, and
//! `cost` refuses what is small here and would be huge when it is made.
//!
//! Format: `Lib/pickletools.py` of CPython, protocols 2 to 5.

mod cost;
mod emit;
mod graph;
mod input;
mod machine;
mod opcodes;
mod surrogates;

pub use emit::{Emitter, TensorView};
pub use graph::{Graph, Make, Node, NodeId, Object};
pub use machine::{PICKLE_BYTES_MAX, parse};
