//! Primary contexts, and the stack of current ones that each thread has.

use std::cell::RefCell;

use crate::abi::Handle;

thread_local! {
    static CONTEXT_STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// The primary context of a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrimaryContext {
    pub(crate) retain_count: u32,
    /// `None` while nothing retains it.
    pub(crate) handle: Option<Handle>,
}

/// Returns the top of this thread's context stack.
pub(crate) fn current_context() -> Option<Handle> {
    CONTEXT_STACK.with_borrow(|stack| stack.last().copied())
}

/// Calls `change` with this thread's context stack.
pub(crate) fn with_context_stack<T>(change: impl FnOnce(&mut Vec<Handle>) -> T) -> T {
    CONTEXT_STACK.with_borrow_mut(change)
}
