//! Wrappers of a backend.

/// Implements the methods of a wrapper that only call the backend in its field `inner`.
///
/// ```ignore
/// impl Backend for Counter {
///     deepnvme_testkit::forward_to_inner!(kind, depth, in_flight, flush, waker);
///
///     fn submit(&mut self, op: Op) -> Submit { ... }
/// }
/// ```
#[macro_export]
macro_rules! forward_to_inner {
    ($($method:ident),*) => { $($crate::forward_to_inner!(@ $method);)* };
    (@ kind) => {
        fn kind(&self) -> ::deepnvme_io::backend::BackendKind { self.inner.kind() }
    };
    (@ depth) => {
        fn depth(&self) -> u32 { self.inner.depth() }
    };
    (@ in_flight) => {
        fn in_flight(&self) -> u32 { self.inner.in_flight() }
    };
    (@ flush) => {
        fn flush(&mut self) -> ::deepnvme_io::Result<()> { self.inner.flush() }
    };
    (@ waker) => {
        fn waker(&self) -> ::std::sync::Arc<dyn ::deepnvme_io::backend::Wake> { self.inner.waker() }
    };
    (@ registrations) => {
        fn register(&mut self, memory: &::deepnvme_io::mem::RegistrableRange) -> bool { self.inner.register(memory) }

        fn unregister(&mut self, memory: &::deepnvme_io::mem::RegistrableRange) { self.inner.unregister(memory); }
    };
}
