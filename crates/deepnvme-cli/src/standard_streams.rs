//! Standard streams of a process that may have been started with some of them closed.

use std::io::{self, Stdout, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};

use rustix::fs::{Mode, OFlags, fcntl_getfl, open};
use rustix::io::Errno;

/// Opens `/dev/null` as each of the descriptors 0, 1 and 2 that is closed. Otherwise the next file or ring would get
/// that number, and the command's output would be written into it.
///
/// Streams that were closed still fail: standard input is opened for writing only, the others for reading only.
pub fn reserve_standard_streams() {
    loop {
        // The kernel gives the lowest free number, which decides the mode.
        let Ok(write_only) = open("/dev/null", OFlags::WRONLY, Mode::empty()) else { return };
        match write_only.as_raw_fd() {
            // Stays open until the process ends.
            0 => _ = write_only.into_raw_fd(),
            1 | 2 => {
                drop(write_only);
                let Ok(read_only) = open("/dev/null", OFlags::RDONLY, Mode::empty()) else { return };
                let _ = read_only.into_raw_fd();
            }
            _ => return,
        }
    }
}

/// Standard output whose writes fail if it is closed. The standard library's succeed.
#[derive(Debug)]
pub struct CheckedStdout(Stdout);

impl CheckedStdout {
    /// Wraps the standard output of this process.
    #[must_use]
    pub fn new() -> Self {
        Self(io::stdout())
    }

    fn check_writable(&self) -> io::Result<()> {
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
        self.check_writable()?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
