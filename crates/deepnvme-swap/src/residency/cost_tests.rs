//! The cost of decisions with many items: the items, waiters and spans of memory that they look at, on any machine.

use std::sync::Arc;

use deepnvme_testkit::rng::Rng;

use super::*;
use crate::next_use::NextUseQueue;
use crate::slot_allocator::ItemId;

const ITEMS: usize = 20_000;
const BORROWS: usize = 20_000;

/// The order of the borrows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    Scheduled,
    Random,
    /// At random, with a schedule that says otherwise.
    Unexpected,
}

/// The cost of a run.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    steps: u64,
    /// Of one borrow, with its release and all I/O.
    steps_max: u64,
    reads: u64,
}

/// Memory for a part of the items, each of which is changed when it is borrowed. The disk is instant.
struct World {
    residency: Residency,
    ids: Vec<ItemId>,
    reads: u64,
}

impl World {
    fn new(sizes: &[usize], memory_bytes: usize, order: Order) -> Self {
        let share = memory_bytes / 8 * 3;
        let budgets = Budgets { prefetch_bytes: share, headroom_bytes: share };
        let mut residency = Residency::new(memory_bytes, budgets);
        let key = |index: usize| -> Arc<str> { index.to_string().into() };
        let ids = sizes.iter().enumerate().map(|(index, size)| residency.add(&key(index), *size, true)).collect();
        if order != Order::Random {
            residency.schedule(NextUseQueue::new((0..sizes.len()).map(key).collect(), true));
        }
        Self { residency, ids, reads: 0 }
    }

    fn pump(&mut self) {
        while let Some(action) = self.residency.next() {
            match action {
                Action::Read { id, .. } => {
                    self.reads += 1;
                    self.residency.read_completed(id, true, true);
                }
                Action::Write { id, .. } => self.residency.write_completed(id, true),
                Action::SlotReserved => {}
            }
        }
    }

    fn use_one(&mut self, id: ItemId) {
        let mut borrowed = self.residency.try_borrow(id, BorrowMode::Exclusive);
        if borrowed == BorrowResult::NeedsSlot {
            self.residency.enqueue_waiter(id, BorrowMode::Exclusive);
            self.pump();
            borrowed = self.residency.try_borrow(id, BorrowMode::Exclusive);
            self.residency.cancel_waiter(id, BorrowMode::Exclusive);
        }
        assert!(matches!(borrowed, BorrowResult::Borrowed(Some(_))), "{borrowed:?}");
        self.pump();
        self.residency.release(id, BorrowMode::Exclusive, true);
        self.pump();
    }
}

fn run(sizes: &[usize], (part, parts): (usize, usize), order: Order, borrows: usize, search_steps_max: usize) -> Cost {
    let mut world = World::new(sizes, sizes.iter().sum::<usize>() / parts * part, order);
    world.residency.search_steps_max = search_steps_max;
    let mut cost = Cost::default();
    for turn in 0..borrows {
        let index = match order {
            Order::Scheduled => turn % sizes.len(),
            Order::Random | Order::Unexpected => Rng::keyed(7, &[turn as u64]).below(sizes.len() as u64) as usize,
        };
        let before = world.residency.steps;
        world.use_one(world.ids[index]);
        let steps = world.residency.steps - before;
        // Until memory is full, the first borrows read all that fits.
        if turn > 256 {
            cost.steps_max = cost.steps_max.max(steps);
        }
        cost.steps += steps;
    }
    cost.reads = world.reads;
    cost
}

/// Sizes of one to eight pages.
fn mixed() -> Vec<usize> {
    (0..ITEMS as u64).map(|index| 1 + Rng::keyed(1, &[index]).below(8) as usize).collect()
}

/// Many small items, and a few that are a hundred times as large.
fn skewed() -> Vec<usize> {
    let size = |index: u64| if Rng::keyed(2, &[index]).below(50) == 0 { 100 } else { 1 };
    (0..ITEMS as u64).map(size).collect()
}

#[test]
fn borrows_of_equal_items_cost_the_same_however_many_there_are() {
    for share in [(1, 4), (1, 1)] {
        for order in [Order::Scheduled, Order::Random] {
            let cost = run(&vec![1; ITEMS], share, order, BORROWS, victims::STEPS_MAX);
            assert!(cost.steps <= 24 * BORROWS as u64 && cost.steps_max <= 64, "{order:?}, {share:?}: {cost:?}");
        }
    }
}

#[test]
fn borrows_of_mixed_items_cost_hardly_more() {
    for order in [Order::Scheduled, Order::Random] {
        let cost = run(&mixed(), (1, 4), order, BORROWS, victims::STEPS_MAX);
        assert!(cost.steps <= 40 * BORROWS as u64 && cost.steps_max <= 512, "{order:?}: {cost:?}");
    }
}

/// Each jump of the schedule asks for other items. The cost is that of their reads.
#[test]
fn a_schedule_that_is_wrong_costs_no_more_than_its_reads() {
    for sizes in [vec![1; ITEMS], mixed()] {
        let cost = run(&sizes, (1, 4), Order::Unexpected, BORROWS / 20, victims::STEPS_MAX);
        assert!(cost.steps <= 64 * cost.reads && cost.steps_max <= 20_000, "{cost:?}");
    }
}

/// A search that ends early leaves larger gaps. It reads fewer mixed items than the search for the best range, which is
/// that of the reference.
#[test]
fn a_short_search_reads_hardly_more_than_a_whole_one() {
    for (sizes, percent_more) in [(mixed(), 0), (skewed(), 1)] {
        for order in [Order::Scheduled, Order::Random] {
            let short = run(&sizes, (1, 4), order, BORROWS, victims::STEPS_MAX);
            let whole = run(&sizes, (1, 4), order, BORROWS, usize::MAX);
            let reads_max = whole.reads + whole.reads * percent_more / 100;
            assert!(short.reads <= reads_max, "{order:?}: {short:?} instead of {whole:?}");
        }
    }
}
