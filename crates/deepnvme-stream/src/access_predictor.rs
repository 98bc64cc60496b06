//! What comes next: pure.
//!
//! Layers are called in the same order step by step. After each unit, the one that came next the last time is expected
//! again; before anything has been called, the order in which the units were given.

/// Who follows whom, and how often each has come.
#[derive(Clone, Debug)]
pub(crate) struct Forecast {
    next: Vec<usize>,
    uses: Vec<u32>,
    last: Option<usize>,
}

/// From so many uses on, all counts are halved: what was hot long ago cools down.
const USES_MAX: u32 = 64;

impl Forecast {
    pub(crate) fn new(units: usize) -> Self {
        Self { next: (0..units).map(|unit| (unit + 1) % units.max(1)).collect(), uses: vec![0; units], last: None }
    }

    /// A unit is called. True when that ends a step: the order begins anew, or turns to what was called before.
    pub(crate) fn called(&mut self, unit: usize) -> bool {
        let last = self.last.replace(unit);
        // Twice in a row (an output layer and the embedding that has its weights) says nothing of what comes then.
        if let Some(last) = last.filter(|last| *last != unit) {
            self.next[last] = unit;
        }
        self.uses[unit] += 1;
        if self.uses[unit] > USES_MAX {
            self.uses.iter_mut().for_each(|uses| *uses /= 2);
        }
        last.is_some_and(|last| unit <= last)
    }

    /// The units that are expected after the last one, each once, the nearest first. The last one itself is in it where the
    /// order comes back to it.
    pub(crate) fn expected(&self) -> Vec<usize> {
        let units = self.next.len();
        let mut seen = vec![false; units];
        let mut unit = match self.last {
            Some(last) => self.next[last],
            None => 0,
        };
        let mut expected = Vec::with_capacity(units);
        while expected.len() < units && !seen[unit] {
            seen[unit] = true;
            expected.push(unit);
            unit = self.next[unit];
        }
        expected
    }

    /// Whether a unit is called about as often as the most frequent one of its like.
    pub(crate) fn is_hot(&self, unit: usize, like: &[usize]) -> bool {
        let most = like.iter().map(|unit| self.uses[*unit]).max().unwrap_or(0);
        self.uses[unit] * 2 > most || most <= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_last_step_is_expected_again() {
        let mut forecast = Forecast::new(4);
        assert_eq!(forecast.expected(), [0, 1, 2, 3]);
        let ends: Vec<bool> = [0, 2, 1, 3, 0].map(|unit| forecast.called(unit)).to_vec();
        assert_eq!(ends, [false, false, true, false, true]);
        assert_eq!(forecast.expected(), [2, 1, 3, 0]);
    }

    #[test]
    fn who_begins_and_ends_a_step_is_followed_by_the_second() {
        let mut forecast = Forecast::new(3);
        for unit in [0, 1, 2, 0, 0, 1, 2, 0] {
            forecast.called(unit);
        }
        assert_eq!(forecast.expected(), [1, 2, 0]);
        forecast.called(0);
        assert_eq!(forecast.expected(), [1, 2, 0]);
    }

    #[test]
    fn a_decoder_is_hotter_than_the_encoder_that_ran_once() {
        let mut forecast = Forecast::new(4);
        for unit in [0, 1, 2, 3, 2, 3, 2, 3, 2, 3] {
            forecast.called(unit);
        }
        let like = [0, 1, 2, 3];
        assert_eq!(like.map(|unit| forecast.is_hot(unit, &like)), [false, false, true, true]);
        assert_eq!(forecast.expected(), [2, 3], "who is not called is not expected");
    }

    #[test]
    fn old_heat_is_lost() {
        let mut forecast = Forecast::new(2);
        for _ in 0..60 {
            forecast.called(0);
        }
        for _ in 0..100 {
            forecast.called(1);
        }
        assert!(!forecast.is_hot(0, &[0, 1]) && forecast.is_hot(1, &[0, 1]));
    }
}
