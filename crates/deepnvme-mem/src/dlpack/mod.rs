//! DLPack: tensors exchanged between libraries without copies.
//!
//! - [`abi`]: the C structs, in the form before version 1.0 ([`DLManagedTensor`]) and since
//!   ([`DLManagedTensorVersioned`]). [`Managed`] is their common interface, with the names of their capsules.
//! - [`export()`] turns memory into a tensor for another library. The memory lives until that library calls the
//!   deleter.
//! - [`import()`] turns another library's tensor into memory, after checking it. The deleter is called once, when the
//!   last region of the tensor is dropped, on any thread.
//! - [`ExchangeApi`]: the C functions with which a library describes its own tensors without Python.
//!
//! In Python the structs travel in capsules, which the binding creates and opens.

/// Returns the offsets of fields of a struct.
#[cfg(test)]
macro_rules! offsets {
    ($type:ident: $($field:ident),*) => { [$(std::mem::offset_of!($type, $field)),*] };
}

pub mod abi;
mod exchange;
mod export;
mod import;
mod layout;
mod managed;

pub use abi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor};
pub use exchange::ExchangeApi;
pub use export::{Exported, export, release};
pub use import::{Imported, import};
pub use managed::{Deleter, Managed};
