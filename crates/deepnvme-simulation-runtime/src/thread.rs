//! Threads run by the simulation's scheduler, each in a simulated process.

use std::cell::{Cell, OnceCell};
use std::io;
use std::num::NonZero;
use std::time::Duration;

use shuttle::sync::mpsc;
pub use shuttle::thread::{JoinHandle, LocalKey, ScopedJoinHandle, Thread, ThreadId, current, park};

use crate::time;

/// Real code needs larger stacks than shuttle's default.
pub const STACK_BYTES: usize = 256 << 10;

/// Number of a simulated process.
pub type ProcessId = u32;
/// Number of a simulated machine: the first one, or a copy under inspection.
pub type WorldId = u32;

shuttle::thread_local! {
    static PROCESS: Cell<ProcessId> = Cell::new(0);
}
shuttle::thread_local! {
    static WORLD: Cell<WorldId> = Cell::new(0);
}

/// Returns the calling thread's process. Process 0 is the simulation itself.
#[must_use]
pub fn process() -> ProcessId {
    // While a thread exits, its locals may be gone. Its destructors then run as the simulation.
    PROCESS.try_with(Cell::get).unwrap_or(0)
}

/// Runs `work` as part of a process.
pub fn in_process<T>(process: ProcessId, work: impl FnOnce() -> T) -> T {
    with_value(&PROCESS, process, work)
}

/// Returns the calling thread's machine.
#[must_use]
pub fn world() -> WorldId {
    WORLD.try_with(Cell::get).unwrap_or(0)
}

/// Runs `work` on a machine.
pub fn in_world<T>(world: WorldId, work: impl FnOnce() -> T) -> T {
    with_value(&WORLD, world, work)
}

/// Runs `work` with another value of a local.
fn with_value<V: 'static, T>(local: &'static LocalKey<Cell<V>>, value: V, work: impl FnOnce() -> T) -> T {
    let before = local.with(|current| current.replace(value));
    let result = work();
    local.with(|current| current.set(before));
    result
}

/// Runs `work` on the machine and in the process of the spawning thread.
fn inheriting<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let (world, process) = (world(), process());
    move || in_world(world, || in_process(process, work))
}

/// Works like `std::thread::Scope`.
#[derive(Debug)]
pub struct Scope<'scope, 'env> {
    inner: &'scope shuttle::thread::Scope<'scope, 'env>,
    /// Ends the keeper thread.
    keeper: OnceCell<mpsc::Sender<()>>,
}

/// Works like `std::thread::scope`. The last thread that ends in `shuttle`'s scope wakes the opener, even from an
/// unrelated wait. A keeper thread therefore runs until `work` returns, so no thread is the last before the opener
/// waits for the scope.
pub fn scope<'env, T>(work: impl for<'scope> FnOnce(&Scope<'scope, 'env>) -> T) -> T {
    shuttle::thread::scope(|inner| {
        let scope = Scope { inner, keeper: OnceCell::new() };
        work(&scope)
    })
}

impl<'scope> Scope<'scope, '_> {
    /// Works like `std::thread::Scope::spawn`.
    pub fn spawn<F, T>(&self, work: F) -> ScopedJoinHandle<'scope, T>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        self.keeper.get_or_init(|| {
            let (ends, ended) = mpsc::channel();
            self.inner.spawn(move || {
                let _ = ended.recv();
            });
            ends
        });
        self.inner.spawn(inheriting(work))
    }
}

/// Works like `std::thread::spawn`.
pub fn spawn<F, T>(work: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    shuttle::thread::spawn(inheriting(work))
}

/// Lets other threads run first.
pub fn yield_now() {
    shuttle::thread::yield_now();
}

/// Lets time pass and other threads run.
pub fn sleep(duration: Duration) {
    time::advance(duration);
    shuttle::thread::yield_now();
}

/// Returns two, on every machine.
///
/// # Errors
/// None.
pub fn available_parallelism() -> io::Result<NonZero<usize>> {
    Ok(NonZero::<usize>::MIN.saturating_add(1))
}

/// Works like `std::thread::Builder`.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

impl Builder {
    /// Creates a builder without a thread name.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the thread's name.
    #[must_use]
    pub fn name(mut self, name: String) -> Self {
        self.name = Some(name);
        self
    }

    /// Ignores the size: every simulated thread has the same stack.
    #[must_use]
    pub fn stack_size(self, _bytes: usize) -> Self {
        self
    }

    /// Works like `std::thread::Builder::spawn`.
    ///
    /// # Errors
    /// None.
    pub fn spawn<F, T>(self, work: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let builder = shuttle::thread::Builder::new().name(self.name.unwrap_or_default());
        builder.spawn(inheriting(work))
    }

    /// Works like `std::thread::Builder::spawn_scoped`, without the thread's name.
    ///
    /// # Errors
    /// None.
    pub fn spawn_scoped<'scope, 'env, F, T>(
        self,
        scope: &Scope<'scope, 'env>,
        work: F,
    ) -> io::Result<ScopedJoinHandle<'scope, T>>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        Ok(scope.spawn(work))
    }
}
