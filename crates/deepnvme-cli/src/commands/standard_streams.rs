//! Standard streams of a process that was started without some of them.

use std::io::{self, Stdout, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};

use rustix::fs::{Mode, OFlags, fcntl_getfl, open};
use rustix::io::Errno;

/// Reserves the descriptors 0, 1 and 2 if they are closed. Otherwise the next file or ring would get one of them, and
/// the command's output would be written into it. Reading fails from a reserved 0, and writing fails to a reserved 1 or
/// 2.
pub fn reserve_standard_streams() {
    loop {
        // The number of the new descriptor decides in which direction it must refuse.
        let Ok(unread) = open("/dev/null", OFlags::WRONLY, Mode::empty()) else { return };
        match unread.as_raw_fd() {
            0 => _ = unread.into_raw_fd(),
            1 | 2 => {
                drop(unread);
                let Ok(unwritten) = open("/dev/null", OFlags::RDONLY, Mode::empty()) else { return };
                let _ = unwritten.into_raw_fd();
            }
            _ => return,
        }
    }
}

/// Standard output. Writing fails if it is closed; the standard library would ignore that.
#[derive(Debug)]
pub struct CheckedStdout(Stdout);

impl CheckedStdout {
    /// Wraps the standard output of this process.
    #[must_use]
    pub fn new() -> Self {
        Self(io::stdout())
    }

    fn check(&self) -> io::Result<()> {
        let flags = fcntl_getfl(self.0.as_fd())?;
        if flags & OFlags::ACCMODE == OFlags::RDONLY { Err(Errno::BADF.into()) } else { Ok(()) }
    }
}

impl Default for CheckedStdout {
    fn default() -> Self {
        Self::new()
    }
}

impl Write for CheckedStdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
