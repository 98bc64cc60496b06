//! The call log: counted calls, pending faults, and violations.
//!
//! A fault belongs to a symbol, or to a point inside a function that fails when it is reached. A fault of
//! `cuFileReadAsync@stream`, `cuFileWriteAsync@stream` or `cuFileBatchIO@entry` makes the transfer fail on its stream
//! or in its batch, after the call has succeeded. The code of `cuFileRead@short` and `cuFileWrite@short` is the maximum
//! number of bytes transferred. With `cuFileBatchIOGetStatus@silent`, the call reports neither events nor a failure.
//! `cuFileBatchIO@slow` delays a transfer of a batch by its code in milliseconds. With
//! `cuFileHandleRegister@unsupported`, the file is on a file system without a direct path: cuFile refuses it, or copies
//! its bytes through the host if compatibility mode is allowed.

use std::collections::{BTreeMap, HashMap};

use crate::config::Fault;

/// The maximum number of violations that are kept.
const VIOLATIONS_MAX: usize = 1000;

/// Counters, faults and violations.
#[derive(Debug, Default)]
pub(crate) struct CallLog {
    calls: HashMap<String, u64>,
    /// By symbol: the calls that fail, with their codes.
    once: HashMap<String, Vec<(u64, i32)>>,
    always: HashMap<String, i32>,
    counters: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

impl CallLog {
    /// Creates a log with the faults of the environment.
    pub(crate) fn new(faults: &[Fault]) -> Self {
        let mut call_log = Self::default();
        for fault in faults {
            match fault.after {
                Some(after) => call_log.fail(&fault.symbol, after, fault.code),
                None => call_log.fail_always(&fault.symbol, fault.code),
            }
        }
        call_log
    }

    /// Counts a call of `symbol`. Returns the code that it must fail with, if any.
    pub(crate) fn call(&mut self, symbol: &str) -> Option<i32> {
        let number = match self.calls.get_mut(symbol) {
            Some(calls) => {
                *calls += 1;
                *calls - 1
            }
            None => {
                self.calls.insert(symbol.to_owned(), 1);
                0
            }
        };
        if let Some(waiting) = self.once.get_mut(symbol)
            && let Some(index) = waiting.iter().position(|(call, _)| *call == number)
        {
            return Some(waiting.swap_remove(index).1);
        }
        self.always.get(symbol).copied()
    }

    /// Makes one call fail, after `after` others.
    pub(crate) fn fail(&mut self, symbol: &str, after: u64, code: i32) {
        let number = self.calls(symbol) + after;
        self.once.entry(symbol.to_owned()).or_default().push((number, code));
    }

    /// Makes every call fail from now on.
    pub(crate) fn fail_always(&mut self, symbol: &str, code: i32) {
        self.always.insert(symbol.to_owned(), code);
    }

    /// Returns the number of calls of `symbol`, including failed ones.
    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        self.calls.get(symbol).copied().unwrap_or(0)
    }

    /// Increments a counter.
    pub(crate) fn count(&mut self, counter: &'static str) {
        *self.counters.entry(counter).or_default() += 1;
    }

    /// Returns a counter.
    pub(crate) fn counted(&self, counter: &str) -> u64 {
        match counter {
            "calls" => self.calls.values().sum(),
            "violations" => self.violations.len() as u64,
            _ => self.counters.get(counter).copied().unwrap_or(0),
        }
    }

    /// Records a violation.
    pub(crate) fn violation(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(text);
        }
    }

    /// Returns all violations, one per line.
    pub(crate) fn violations(&self) -> String {
        self.violations.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_hits_the_call_that_it_names_and_no_other() {
        let mut call_log = CallLog::default();
        assert_eq!(call_log.call("f"), None);
        call_log.fail("f", 1, 7);
        call_log.fail("f", 3, 8);
        let codes: Vec<_> = (0..5).map(|_| call_log.call("f")).collect();
        assert_eq!(codes, [None, Some(7), None, Some(8), None]);
        assert_eq!((call_log.calls("f"), call_log.call("g")), (6, None));
    }

    #[test]
    fn a_standing_fault_stays() {
        let fault = |after, code| Fault { symbol: "f".to_owned(), after, code };
        let mut call_log = CallLog::new(&[fault(None, 2), fault(Some(1), 3)]);
        assert_eq!([call_log.call("f"), call_log.call("f"), call_log.call("f")], [Some(2), Some(3), Some(2)]);
    }
}
