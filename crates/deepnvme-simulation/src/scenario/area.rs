//! Possible contents of a file range, byte by byte, after all answered writes. This module does no I/O.

use std::collections::BTreeMap;

/// A range that one thread writes to.
#[derive(Clone, Debug)]
pub(super) struct Area {
    /// Bytes that readers find, where they are certain.
    certain: Vec<u8>,
    /// All bytes that readers may find, where they are uncertain.
    uncertain: BTreeMap<usize, Vec<u8>>,
    /// Bytes that a power cut cannot revert.
    durable: Vec<u8>,
    /// Bytes that a power cut may leave instead.
    at_risk: BTreeMap<usize, Vec<u8>>,
}

impl Area {
    /// Creates a range with these durable bytes.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { certain: bytes.clone(), uncertain: BTreeMap::new(), durable: bytes, at_risk: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.certain.len()
    }

    /// Starts a write of these bytes.
    pub(super) fn begin_write(&mut self, at: usize, bytes: &[u8]) {
        for (index, byte) in (at..).zip(bytes) {
            let certain = self.certain[index];
            insert_unique(self.uncertain.entry(index).or_insert_with(|| vec![certain]), *byte);
            insert_unique(self.at_risk.entry(index).or_default(), *byte);
        }
    }

    /// Finishes a write of these bytes.
    pub(super) fn finish_write(&mut self, at: usize, bytes: &[u8]) {
        for (index, byte) in (at..).zip(bytes) {
            self.certain[index] = *byte;
            self.uncertain.remove(&index);
        }
    }

    /// Makes all finished writes durable.
    pub(super) fn sync(&mut self) {
        let Self { certain, uncertain, durable, at_risk } = self;
        at_risk.retain(|index, _| uncertain.contains_key(index));
        for (index, byte) in certain.iter().enumerate().filter(|(index, _)| !at_risk.contains_key(index)) {
            durable[index] = *byte;
        }
    }

    /// Checks bytes that were read while no write was in flight. Returns the error, if any. The bytes are certain from
    /// now on.
    pub(super) fn check_read(&mut self, at: usize, bytes: &[u8]) -> Option<String> {
        for (index, byte) in (at..).zip(bytes) {
            if !self.may_show(index, *byte) {
                return Some(format!("byte {index} is {byte:#04x}, not {:#04x}", self.certain[index]));
            }
            self.certain[index] = *byte;
            self.uncertain.remove(&index);
        }
        None
    }

    fn may_show(&self, index: usize, byte: u8) -> bool {
        self.uncertain.get(&index).map_or(self.certain[index] == byte, |possible| possible.contains(&byte))
    }

    /// Checks all bytes after all processes ended or the power was cut. Returns the error, if any.
    pub(super) fn check_all(&self, bytes: &[u8], after_cut: bool) -> Option<String> {
        let is_wrong = |(index, byte): &(usize, &u8)| {
            let may_be_left =
                self.durable[*index] == **byte || self.at_risk.get(index).is_some_and(|at_risk| at_risk.contains(byte));
            if after_cut { !may_be_left } else { !self.may_show(*index, **byte) }
        };
        let (index, byte) = bytes.iter().enumerate().find(is_wrong)?;
        let (certain, durable) = (self.certain[index], self.durable[index]);
        Some(format!("byte {index} is {byte:#04x}; it was {certain:#04x}, and {durable:#04x} on the disk"))
    }

    /// Returns the bytes that readers find, where they are certain.
    pub(super) fn certain(&self) -> &[u8] {
        &self.certain
    }
}

fn insert_unique(values: &mut Vec<u8>, byte: u8) {
    if !values.contains(&byte) {
        values.push(byte);
    }
}
