//! Primary contexts, and the stack of current ones that each thread has.

use std::cell::RefCell;

use crate::abi::Handle;

thread_local! {
    static CONTEXTS: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// A device's primary context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Primary {
    pub(crate) retained: u32,
    pub(crate) context: Option<Handle>,
}

/// Returns the top of this thread's context stack.
pub(crate) fn current_context() -> Option<Handle> {
    CONTEXTS.with_borrow(|stack| stack.last().copied())
}

/// Modifies this thread's context stack.
pub(crate) fn with_contexts<T>(change: impl FnOnce(&mut Vec<Handle>) -> T) -> T {
    CONTEXTS.with_borrow_mut(change)
}
