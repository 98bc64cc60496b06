//! One buffer of a reader: being read, or full.

use deepnvme_io::mem::{Buffer, RegionMut};

use deepnvme_io::Transfer;
use deepnvme_io::{Error, ErrorKind, Result};

/// A requested range of the file.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) filling: Filling,
}

#[derive(Debug)]
pub(super) enum Filling {
    InFlight(Transfer<RegionMut>),
    Full(Buffer),
}

/// A completed range of the file.
#[derive(Debug)]
pub(super) struct Held {
    offset: u64,
    bytes: usize,
    buffer: Buffer,
}

impl Window {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes as u64
    }

    pub(super) fn holds(&self, offset: u64) -> bool {
        (self.offset..self.end()).contains(&offset)
    }

    /// Returns whether the window came from the page cache. The disk is then idle anyway.
    pub(super) fn is_full(&self) -> bool {
        matches!(self.filling, Filling::Full(_))
    }

    /// Cancels the part of the read that has not begun.
    pub(super) fn cancel(self) {
        if let Filling::InFlight(pending) = &self.filling {
            pending.cancel();
        }
    }

    /// Waits for the read.
    pub(super) fn wait(self) -> Result<Held> {
        let buffer = match self.filling {
            Filling::Full(buffer) => buffer,
            Filling::InFlight(pending) => {
                pending.prioritise();
                let (memory, result) = pending.wait();
                result?;
                let buffer = memory.and_then(|memory| memory.into_buffer().ok());
                buffer.ok_or_else(|| {
                    Error::new(
                        ErrorKind::Io,
                        "read",
                        "the engine did not return the buffer of a read; report this as a bug",
                    )
                })?
            }
        };
        Ok(Held { offset: self.offset, bytes: self.bytes, buffer })
    }
}

impl Held {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes as u64
    }

    /// Returns the bytes from `offset` on, or `None` if `offset` is outside.
    pub(super) fn from(&self, offset: u64) -> Option<&[u8]> {
        let at = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.buffer.as_slice().get(at..self.bytes).filter(|bytes| !bytes.is_empty())
    }

    pub(super) fn into_buffer(self) -> Buffer {
        self.buffer
    }
}
