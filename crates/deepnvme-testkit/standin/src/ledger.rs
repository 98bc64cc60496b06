//! What happened, and what is to happen: calls are counted here, faults wait here, violations are kept here.
//!
//! A fault belongs to a symbol. Some names are no symbols but moments inside one, which fail when they are
//! reached: `cuFileReadAsync@stream`, `cuFileWriteAsync@stream` and `cuFileBatchIO@entry` (the transfer itself,
//! long after the call that asked for it), and `cuFileRead@short`, `cuFileWrite@short`, whose code is how many
//! bytes the transfer moves at most; `cuFileBatchIOGetStatus@silent` reports nothing, and no failure; `cuFileBatchIO@slow` is a
//! transfer of a batch that takes as many milliseconds longer as its code says.

use std::collections::{BTreeMap, HashMap};

use crate::config::Fault;

/// More violations than this say nothing new.
const VIOLATIONS_MAX: usize = 1000;

/// Counters, faults and violations.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    calls: HashMap<String, u64>,
    /// By symbol: the numbers of calls that fail, with their codes.
    once: HashMap<String, Vec<(u64, i32)>>,
    always: HashMap<String, i32>,
    counters: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

impl Ledger {
    /// A ledger with the faults that the environment asks for.
    pub(crate) fn new(faults: &[Fault]) -> Self {
        let mut ledger = Self::default();
        for fault in faults {
            match fault.after {
                Some(after) => ledger.fail(&fault.symbol, after, fault.code),
                None => ledger.fail_always(&fault.symbol, fault.code),
            }
        }
        ledger
    }

    /// Counts a call of `symbol`, and says with which code it has to fail, if it has to.
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

    /// Lets the call that comes `after` so many others fail, once.
    pub(crate) fn fail(&mut self, symbol: &str, after: u64, code: i32) {
        let number = self.calls(symbol) + after;
        self.once.entry(symbol.to_owned()).or_default().push((number, code));
    }

    /// Lets every call fail from now on.
    pub(crate) fn fail_always(&mut self, symbol: &str, code: i32) {
        self.always.insert(symbol.to_owned(), code);
    }

    /// How often `symbol` was called, failures included.
    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        self.calls.get(symbol).copied().unwrap_or(0)
    }

    /// Adds one to a counter.
    pub(crate) fn count(&mut self, counter: &'static str) {
        *self.counters.entry(counter).or_default() += 1;
    }

    /// What a counter stands at.
    pub(crate) fn counted(&self, counter: &str) -> u64 {
        if counter == "violations" {
            return self.violations.len() as u64;
        }
        self.counters.get(counter).copied().unwrap_or(0)
    }

    /// Keeps what a program did that no program may do.
    pub(crate) fn violation(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(text);
        }
    }

    /// All violations, a line for each.
    pub(crate) fn violations(&self) -> String {
        self.violations.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_hits_the_call_that_it_names_and_no_other() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.call("f"), None);
        ledger.fail("f", 1, 7);
        ledger.fail("f", 3, 8);
        let codes: Vec<_> = (0..5).map(|_| ledger.call("f")).collect();
        assert_eq!(codes, [None, Some(7), None, Some(8), None]);
        assert_eq!((ledger.calls("f"), ledger.call("g")), (6, None));
    }

    #[test]
    fn a_standing_fault_stays() {
        let fault = |after, code| Fault { symbol: "f".to_owned(), after, code };
        let mut ledger = Ledger::new(&[fault(None, 2), fault(Some(1), 3)]);
        assert_eq!([ledger.call("f"), ledger.call("f"), ledger.call("f")], [Some(2), Some(3), Some(2)]);
    }
}
