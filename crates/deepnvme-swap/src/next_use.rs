//! When an item is needed next: pure.
//!
//! Exactly, where the caller has said in which order it uses its items; what was asked for ahead comes before that. Of all
//! others only the past is known: who was used last is expected first.

use std::collections::HashMap;
use std::sync::Arc;

/// What was asked for ahead is due before everything else, in the order in which it was asked for.
const WANTED_MAX: u64 = 1 << 40;
/// What is in the order is due before what is not.
const SCHEDULED_MAX: u64 = 1 << 60;
/// What will never be used again, as the order says, is due last.
const NEVER: u64 = 1 << 62;

/// The order in which items are used.
#[derive(Debug, Default)]
pub(crate) struct Order {
    keys: Vec<Arc<str>>,
    /// Where in the order each key is, ascending.
    places: HashMap<Arc<str>, Vec<usize>>,
    repeats: bool,
    /// What is expected next.
    at: usize,
}

impl Order {
    /// That order, from its beginning; again and again if it `repeats`.
    pub(crate) fn new(keys: Vec<Arc<str>>, repeats: bool) -> Self {
        let mut places: HashMap<Arc<str>, Vec<usize>> = HashMap::new();
        for (place, key) in keys.iter().enumerate() {
            places.entry(Arc::clone(key)).or_default().push(place);
        }
        Self { keys, places, repeats, at: 0 }
    }

    /// Somebody uses an item. One that the order does not expect soon is taken for one more use of what is past.
    pub(crate) fn used(&mut self, key: &str) {
        if let Some(distance) = self.distance(key)
            && (distance == 0 || distance <= self.left() / 2)
        {
            let next = self.at + distance + 1;
            self.at = if self.repeats { next % self.keys.len() } else { next };
        }
    }

    /// Uses of others before the next one of this item; `None` where the order says nothing of it, or that there is none.
    pub(crate) fn distance(&self, key: &str) -> Option<usize> {
        let places = self.places.get(key)?;
        let later = places.partition_point(|place| *place < self.at);
        match (places.get(later), places.first()) {
            (Some(place), _) => Some(place - self.at),
            (None, Some(first)) if self.repeats => Some(self.keys.len() - self.at + first),
            _ => None,
        }
    }

    /// What is used next, one after the other, for one round.
    pub(crate) fn upcoming(&self) -> impl Iterator<Item = &Arc<str>> {
        let (past, next) = self.keys.split_at(self.at.min(self.keys.len()));
        next.iter().chain(past.iter().take(if self.repeats { past.len() } else { 0 }))
    }

    /// When an item is due: the smaller, the sooner. `wanted` is its turn among those asked for ahead, `age` how many uses
    /// of others its last one is ago.
    pub(crate) fn due(&self, key: &str, wanted: Option<u64>, age: u64) -> u64 {
        if let Some(turn) = wanted {
            return turn.min(WANTED_MAX - 1);
        }
        match self.distance(key) {
            Some(distance) => WANTED_MAX + distance as u64,
            None if self.places.contains_key(key) => NEVER + age,
            None => SCHEDULED_MAX + age,
        }
    }

    fn left(&self) -> usize {
        if self.repeats { self.keys.len() } else { self.keys.len() - self.at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(keys: &str, repeats: bool) -> Order {
        Order::new(keys.chars().map(|key| key.to_string().into()).collect(), repeats)
    }

    fn upcoming(order: &Order) -> String {
        order.upcoming().map(|key| &**key).collect()
    }

    #[test]
    fn an_order_that_repeats_wraps_around() {
        let mut order = order("abcab", true);
        assert_eq!((order.distance("a"), order.distance("c"), order.distance("x")), (Some(0), Some(2), None));
        for key in ["a", "b", "c"] {
            order.used(key);
        }
        assert_eq!((order.distance("a"), order.distance("c"), upcoming(&order).as_str()), (Some(0), Some(4), "ababc"));
        order.used("a");
        order.used("b");
        assert_eq!(upcoming(&order), "abcab");
    }

    #[test]
    fn an_order_that_ends_says_what_is_never_used_again() {
        let mut order = order("abc", false);
        order.used("a");
        assert_eq!((order.distance("a"), upcoming(&order).as_str()), (None, "bc"));
        assert!(order.due("a", None, 0) > order.due("other", None, 1000));
        order.used("b");
        order.used("c");
        assert_eq!(upcoming(&order), "");
        order.used("c");
    }

    #[test]
    fn uses_out_of_order_are_followed_for_a_little_way() {
        let mut order = order("abcdefgh", true);
        order.used("b");
        assert_eq!(upcoming(&order), "cdefghab", "one was left out, or comes late");
        order.used("a");
        assert_eq!(upcoming(&order), "cdefghab", "it came late");
        order.used("g");
        assert_eq!(upcoming(&order), "habcdefg", "it was left out");
    }

    #[test]
    fn what_is_due_first() {
        let order = order("ab", true);
        let due = [
            order.due("x", Some(0), 9),
            order.due("y", Some(1), 0),
            order.due("a", None, 5),
            order.due("b", None, 0),
            order.due("z", None, 0),
            order.due("z", None, 3),
        ];
        assert!(due.is_sorted() && due.windows(2).all(|pair| pair[0] < pair[1]), "{due:?}");
        assert_eq!(Order::default().upcoming().count(), 0);
    }
}
