//! Thousands of reproducible mutations of metadata. Each changes one field: a number, a name, a type, a count or a
//! depth. A full verify then gives the same tensors or a typed error.
//!
//! `attack` writes mutations and loads them. `json`, `zip` and `pickle` mutate. `safetensors`, `archives` and `manifests`
//! contain the tests.

#![allow(clippy::unwrap_used, clippy::panic)]

mod archives;
mod attack;
#[path = "../common/mod.rs"]
mod common;
#[path = "../fuzz_bodies/mod.rs"]
mod fuzz_bodies;
mod json;
mod manifests;
mod pickle;
mod safetensors;
mod zip;
