//! The standard streams of a process that may have been started without some of them.

use std::io::{self, Stdout, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};

use rustix::fs::{Mode, OFlags, fcntl_getfl, open};
use rustix::io::Errno;

/// Takes the numbers of standard streams that are closed. The next file or ring that is opened would get them otherwise, and
/// what the command says would be written into it. Nothing can be read from or written to what has the numbers then.
pub fn keep_numbers() {
    loop {
        // Nobody knows beforehand which number it will be, and each refuses one direction.
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

/// The standard output. Where it is closed, writing is an error, which the standard library would not say.
#[derive(Debug)]
pub struct Output(Stdout);

impl Output {
    /// That of this process.
    #[must_use]
    pub fn new() -> Self {
        Self(io::stdout())
    }

    fn check(&self) -> io::Result<()> {
        let flags = fcntl_getfl(self.0.as_fd())?;
        if flags & OFlags::ACCMODE == OFlags::RDONLY { Err(Errno::BADF.into()) } else { Ok(()) }
    }
}

impl Default for Output {
    fn default() -> Self {
        Self::new()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
