//! Predicts the order of layer groups. This module does no I/O.
//!
//! Layers run in the same order in each step. After each group, the one that followed it last time is expected again.
//! Before the first step, the given order is expected.

/// The successor of each group, and how often each group was used.
#[derive(Clone, Debug)]
pub(crate) struct AccessPredictor {
    next: Vec<usize>,
    uses: Vec<u32>,
    last: Option<usize>,
}

/// Above this count all counts are halved, so that old uses fade.
const USES_MAX: u32 = 64;

impl AccessPredictor {
    pub(crate) fn new(groups: usize) -> Self {
        Self { next: (0..groups).map(|group| (group + 1) % groups.max(1)).collect(), uses: vec![0; groups], last: None }
    }

    /// Records the use of a group. Returns whether that ends a step: the order turns back to an earlier group. A
    /// repeated use ends none: an output layer may share the weights of the embedding, which then ends and begins each
    /// step.
    pub(crate) fn record_use(&mut self, group: usize) -> bool {
        let last = self.last.replace(group);
        // A repeated use says nothing about the next group.
        if let Some(last) = last.filter(|last| *last != group) {
            self.next[last] = group;
        }
        self.uses[group] += 1;
        if self.uses[group] > USES_MAX {
            self.uses.iter_mut().for_each(|uses| *uses /= 2);
        }
        last.is_some_and(|last| group < last)
    }

    /// The groups expected after the last one, each once, the nearest first. The last one itself is included if the
    /// order returns to it.
    pub(crate) fn expected(&self) -> Vec<usize> {
        let groups = self.next.len();
        let mut seen = vec![false; groups];
        let mut group = match self.last {
            Some(last) => self.next[last],
            None => 0,
        };
        let mut expected = Vec::with_capacity(groups);
        while expected.len() < groups && !seen[group] {
            seen[group] = true;
            expected.push(group);
            group = self.next[group];
        }
        expected
    }

    /// Whether a group is used more than half as often as the most frequent of its `peers`, or no peer was used twice.
    pub(crate) fn is_frequent(&self, group: usize, peers: &[usize]) -> bool {
        let most = peers.iter().map(|group| self.uses[*group]).max().unwrap_or(0);
        self.uses[group] * 2 > most || most <= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_last_step_is_expected_again() {
        let mut predictor = AccessPredictor::new(4);
        assert_eq!(predictor.expected(), [0, 1, 2, 3]);
        let ends: Vec<bool> = [0, 2, 1, 3, 0].map(|group| predictor.record_use(group)).to_vec();
        assert_eq!(ends, [false, false, true, false, true]);
        assert_eq!(predictor.expected(), [2, 1, 3, 0]);
    }

    #[test]
    fn a_group_at_both_ends_of_a_step_is_followed_by_the_second() {
        let mut predictor = AccessPredictor::new(3);
        let ends = [0, 1, 2, 0, 0, 1, 2, 0].map(|group| predictor.record_use(group));
        assert_eq!(ends, [false, false, false, true, false, false, false, true], "one end a step");
        assert_eq!(predictor.expected(), [1, 2, 0]);
        predictor.record_use(0);
        assert_eq!(predictor.expected(), [1, 2, 0]);
    }

    #[test]
    fn a_decoder_is_more_frequent_than_an_encoder() {
        let mut predictor = AccessPredictor::new(4);
        for group in [0, 1, 2, 3, 2, 3, 2, 3, 2, 3] {
            predictor.record_use(group);
        }
        let like = [0, 1, 2, 3];
        assert_eq!(like.map(|group| predictor.is_frequent(group, &like)), [false, false, true, true]);
        assert_eq!(predictor.expected(), [2, 3], "unused groups are not expected");
    }

    #[test]
    fn old_uses_fade() {
        let mut predictor = AccessPredictor::new(2);
        for _ in 0..60 {
            predictor.record_use(0);
        }
        for _ in 0..100 {
            predictor.record_use(1);
        }
        assert!(!predictor.is_frequent(0, &[0, 1]) && predictor.is_frequent(1, &[0, 1]));
    }
}
