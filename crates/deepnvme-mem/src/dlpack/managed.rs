//! Both forms of a managed tensor, and their common interface.

use std::ffi::{CStr, c_void};

use super::abi::{DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, VERSION};

/// Frees a managed tensor.
pub type Deleter<M> = unsafe extern "C" fn(*mut M);

/// The common interface of both forms of a managed tensor.
pub trait Managed: Sized + 'static + sealed::Sealed {
    /// Name of a capsule whose tensor can be taken.
    const CAPSULE_NAME: &'static CStr;
    /// Name of a capsule whose tensor was taken.
    const USED_CAPSULE_NAME: &'static CStr;

    /// Creates the struct.
    fn assemble(tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self;
    /// Returns the tensor.
    fn tensor(&self) -> &DLTensor;
    /// Returns the function that frees it.
    fn deleter(&self) -> Option<Deleter<Self>>;
    /// Returns the owner, for the deleter.
    fn manager_ctx(&self) -> *mut c_void;
    /// Returns the version, or [`VERSION`] if the form has none.
    fn version(&self) -> DLPackVersion {
        VERSION
    }
    /// Returns the `FLAG_*` bits, or 0 if the form has none.
    fn flags(&self) -> u64 {
        0
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::dlpack::DLManagedTensor {}
    impl Sealed for crate::dlpack::DLManagedTensorVersioned {}
}

/// Defines the accessors of the fields that both forms have.
macro_rules! fields_of_both_forms {
    () => {
        fn tensor(&self) -> &DLTensor {
            &self.dl_tensor
        }
        fn deleter(&self) -> Option<Deleter<Self>> {
            self.deleter
        }
        fn manager_ctx(&self) -> *mut c_void {
            self.manager_ctx
        }
    };
}

impl Managed for DLManagedTensor {
    const CAPSULE_NAME: &'static CStr = c"dltensor";
    const USED_CAPSULE_NAME: &'static CStr = c"used_dltensor";

    fn assemble(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
        Self { dl_tensor, manager_ctx, deleter: Some(deleter) }
    }
    fields_of_both_forms!();
}

impl Managed for DLManagedTensorVersioned {
    const CAPSULE_NAME: &'static CStr = c"dltensor_versioned";
    const USED_CAPSULE_NAME: &'static CStr = c"used_dltensor_versioned";

    fn assemble(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
        Self { version: VERSION, manager_ctx, deleter: Some(deleter), flags: 0, dl_tensor }
    }
    fields_of_both_forms!();
    fn version(&self) -> DLPackVersion {
        self.version
    }
    fn flags(&self) -> u64 {
        self.flags
    }
}
