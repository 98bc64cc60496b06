//! What the two forms of a managed tensor have in common.

use std::ffi::{CStr, c_void};

use super::abi::{DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, VERSION};

/// Frees a managed tensor.
pub type Deleter<M> = unsafe extern "C" fn(*mut M);

/// What the two forms of a managed tensor have in common.
pub trait Managed: Sized + 'static + sealed::Sealed {
    /// The name of a capsule that holds a tensor for somebody to take.
    const CAPSULE_NAME: &'static CStr;
    /// The name of a capsule whose tensor has been taken.
    const USED_CAPSULE_NAME: &'static CStr;

    /// Puts the struct together.
    fn assemble(tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self;
    /// The tensor.
    fn tensor(&self) -> &DLTensor;
    /// What frees it.
    fn deleter(&self) -> Option<Deleter<Self>>;
    /// The owner, for the deleter.
    fn manager_ctx(&self) -> *mut c_void;
    /// The version, where it is told.
    fn version(&self) -> DLPackVersion {
        VERSION
    }
    /// The `FLAG_*` bits, where there are any.
    fn flags(&self) -> u64 {
        0
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::dlpack::DLManagedTensor {}
    impl Sealed for crate::dlpack::DLManagedTensorVersioned {}
}

impl Managed for DLManagedTensor {
    const CAPSULE_NAME: &'static CStr = c"dltensor";
    const USED_CAPSULE_NAME: &'static CStr = c"used_dltensor";

    fn assemble(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
        Self { dl_tensor, manager_ctx, deleter: Some(deleter) }
    }
    fn tensor(&self) -> &DLTensor {
        &self.dl_tensor
    }
    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
    fn manager_ctx(&self) -> *mut c_void {
        self.manager_ctx
    }
}

impl Managed for DLManagedTensorVersioned {
    const CAPSULE_NAME: &'static CStr = c"dltensor_versioned";
    const USED_CAPSULE_NAME: &'static CStr = c"used_dltensor_versioned";

    fn assemble(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
        Self { version: VERSION, manager_ctx, deleter: Some(deleter), flags: 0, dl_tensor }
    }
    fn tensor(&self) -> &DLTensor {
        &self.dl_tensor
    }
    fn deleter(&self) -> Option<Deleter<Self>> {
        self.deleter
    }
    fn manager_ctx(&self) -> *mut c_void {
        self.manager_ctx
    }
    fn version(&self) -> DLPackVersion {
        self.version
    }
    fn flags(&self) -> u64 {
        self.flags
    }
}
