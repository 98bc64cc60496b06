//! DLPack: tensors that change hands between libraries without being copied.
//!
//! - [`abi`]: the structs, exactly as C lays them out, in the form before version 1.0 ([`DLManagedTensor`]) and since
//!   ([`DLManagedTensorVersioned`]); [`Managed`] is what both have in common, the names of their capsules included.
//! - [`export()`]: our memory as somebody else's tensor. It lives until they call the deleter.
//! - [`import()`]: somebody else's tensor as our memory, believed only after it was checked. The deleter is called once,
//!   when the last region of the tensor is dropped, on whatever thread that is.
//!
//! In Python the structs travel in capsules; making and opening those is the binding's task.

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
