//! Reads the operands of a pickle. A length beyond the end is an error.

use crate::error::{Error, Result};

#[derive(Default)]
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of the current instruction.
    instruction_offset: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, instruction_offset: 0 }
    }

    /// Reads the next opcode.
    pub(super) fn instruction(&mut self) -> Result<u8> {
        self.instruction_offset = self.at;
        self.byte()
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        match self.at.checked_add(count).filter(|end| *end <= self.bytes.len()) {
            Some(end) => {
                let taken = &self.bytes[self.at..end];
                self.at = end;
                Ok(taken)
            }
            None => Err(self.error("ends in the middle")),
        }
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Reads a length of `width` bytes, and as many bytes.
    pub(super) fn counted(&mut self, width: usize) -> Result<&'a [u8]> {
        let mut count = [0; 8];
        count[..width].copy_from_slice(self.take(width)?);
        let count = usize::try_from(u64::from_le_bytes(count)).map_err(|_| self.error("ends in the middle"))?;
        self.take(count)
    }

    pub(super) fn line(&mut self) -> Result<Box<str>> {
        let rest = &self.bytes[self.at..];
        let Some(length) = rest.iter().position(|byte| *byte == b'\n') else {
            return Err(self.error("ends in the middle"));
        };
        let text = std::str::from_utf8(&rest[..length]).map_err(|_| self.error("has a name that is not UTF-8"))?;
        self.at += length + 1;
        Ok(text.into())
    }

    pub(super) fn error(&self, what: &str) -> Error {
        Error::corrupt(self.instruction_offset as u64, format!("the pickle {what}"))
    }

    pub(super) fn unknown(&self, code: u8) -> Error {
        let text = format!(
            "the pickle has the instruction {code:#04x} at byte {}, which torch.save does not write",
            self.instruction_offset
        );
        Error::unsupported(text)
    }
}
