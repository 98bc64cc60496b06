//! Arithmetic on intervals of time. This module does no I/O.

/// Start and end in nanoseconds.
pub(crate) type Interval = (u64, u64);

/// The union of intervals, as disjoint intervals in order.
pub(crate) fn union(intervals: impl IntoIterator<Item = Interval>) -> Vec<Interval> {
    let mut sorted: Vec<Interval> = intervals.into_iter().collect();
    sorted.sort_unstable();
    let mut whole: Vec<Interval> = Vec::new();
    for (start, end) in sorted {
        match whole.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => whole.push((start, end)),
        }
    }
    whole
}

/// The total length of disjoint intervals.
pub(crate) fn total_ns(intervals: &[Interval]) -> u64 {
    intervals.iter().map(|(start, end)| end - start).sum()
}

/// The length of the intersection of two unions.
pub(crate) fn overlap(a: &[Interval], b: &[Interval]) -> u64 {
    let (mut at, mut bt, mut sum) = (0, 0, 0);
    while at < a.len() && bt < b.len() {
        sum += a[at].1.min(b[bt].1).saturating_sub(a[at].0.max(b[bt].0));
        if a[at].1 < b[bt].1 { at += 1 } else { bt += 1 }
    }
    sum
}

/// Assigns each interval to the first free row, so that intervals of one row do not overlap. The intervals come in the
/// order of their starts.
pub(crate) fn rows(intervals: impl IntoIterator<Item = Interval>) -> Vec<usize> {
    let mut free_from: Vec<u64> = Vec::new();
    let row = |(start, end): Interval| {
        let row = free_from.iter().position(|free| *free <= start).unwrap_or_else(|| {
            free_from.push(0);
            free_from.len() - 1
        });
        // An empty interval takes up space as well.
        free_from[row] = end.max(start + 1);
        row
    };
    intervals.into_iter().map(row).collect()
}

/// The sum of the amounts of all intervals that contain a moment, from each change on.
pub(crate) fn levels(intervals: impl IntoIterator<Item = (Interval, u64)>) -> Vec<(u64, u64)> {
    let mut changes: Vec<(u64, i128)> = Vec::new();
    for ((start, end), amount) in intervals {
        changes.extend([(start, i128::from(amount)), (end, -i128::from(amount))]);
    }
    changes.sort_unstable_by_key(|(moment, _)| *moment);
    let (mut level, mut levels) = (0_i128, Vec::<(u64, u64)>::new());
    for (moment, change) in changes {
        level += change;
        let now = u64::try_from(level).unwrap_or(0);
        match levels.last_mut() {
            Some(last) if last.0 == moment => last.1 = now,
            _ => levels.push((moment, now)),
        }
    }
    levels
}

/// Reduces levels to the highest of each of about `count_max` equal intervals, and keeps the last one.
pub(crate) fn downsample(levels: Vec<(u64, u64)>, count_max: usize) -> Vec<(u64, u64)> {
    let (Some(first), Some(last)) = (levels.first().copied(), levels.last().copied()) else { return levels };
    if levels.len() <= count_max {
        return levels;
    }
    let width = (last.0 - first.0).div_ceil(count_max.saturating_sub(1).max(1) as u64).max(1);
    let mut kept: Vec<(u64, u64)> = Vec::with_capacity(count_max);
    let mut last_index = None;
    for (moment, level) in levels {
        let index = (moment - first.0) / width;
        match kept.last_mut() {
            Some(highest) if last_index == Some(index) && moment != last.0 => highest.1 = highest.1.max(level),
            _ => kept.push((moment, level)),
        }
        last_index = Some(index);
    }
    kept
}

/// Divides `range` into equal parts and sums the amounts in each. An amount is spread evenly over the part of its
/// interval that lies in the range.
pub(crate) fn distribute(
    range: Interval,
    parts: usize,
    amounts: impl IntoIterator<Item = (Interval, u64)>,
) -> Vec<f64> {
    let mut summary = vec![0.0; parts];
    let width = (range.1.saturating_sub(range.0)) as f64 / parts as f64;
    if width <= 0.0 {
        return summary;
    }
    let place = |moment: u64| moment.saturating_sub(range.0) as f64 / width;
    for ((start, end), amount) in amounts {
        let (from, to) = (place(start), place(end).min(parts as f64));
        let last = (parts - 1).min(to as usize);
        if to <= from {
            summary[last] += amount as f64;
            continue;
        }
        for (index, sum) in summary.iter_mut().enumerate().take(last + 1).skip(from as usize) {
            let inside = to.min(index as f64 + 1.0) - from.max(index as f64);
            *sum += amount as f64 * inside.max(0.0) / (to - from);
        }
    }
    summary
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some_intervals() -> impl Strategy<Value = Vec<Interval>> {
        proptest::collection::vec((0..200_u64, 0..40_u64).prop_map(|(start, len)| (start, start + len)), 0..40)
    }

    /// Each unit of time by itself.
    fn covered(intervals: &[Interval]) -> Vec<bool> {
        (0..300).map(|at| intervals.iter().any(|(start, end)| (*start..*end).contains(&at))).collect()
    }

    proptest! {
        #[test]
        fn unions_cover_the_same_time(a in some_intervals(), b in some_intervals()) {
            let (whole_a, whole_b) = (union(a.clone()), union(b.clone()));
            prop_assert_eq!(covered(&whole_a), covered(&a));
            prop_assert!(whole_a.windows(2).all(|pair| pair[0].1 < pair[1].0));
            prop_assert_eq!(total_ns(&whole_a), covered(&a).iter().filter(|is| **is).count() as u64);
            let both = covered(&a).iter().zip(covered(&b)).filter(|(a, b)| **a && *b).count() as u64;
            prop_assert_eq!(overlap(&whole_a, &whole_b), both);
            prop_assert_eq!(overlap(&whole_b, &whole_a), both);
        }

        #[test]
        fn rows_do_not_overlap_and_are_few(mut intervals in some_intervals()) {
            intervals.sort_unstable();
            let rows = rows(intervals.iter().copied());
            for (index, (interval, row)) in intervals.iter().zip(&rows).enumerate() {
                let mates = intervals[..index].iter().zip(&rows).filter(|(_, other)| *other == row);
                prop_assert!(mates.into_iter().all(|(mate, _)| mate.1.max(mate.0 + 1) <= interval.0));
            }
            let deepest = (0..300_u64).map(|at| intervals.iter().filter(|(start, end)| (*start..(*end).max(start + 1)).contains(&at)).count()).max();
            prop_assert_eq!(rows.iter().max().map_or(0, |row| row + 1), deepest.unwrap_or(0));
        }

        #[test]
        fn levels_are_sums_of_amounts(intervals in some_intervals(), count_max in 2..50_usize) {
            let weighted: Vec<_> = intervals.iter().copied().zip(1..).collect();
            let levels = levels(weighted.iter().copied());
            for (moment, level) in &levels {
                let expected: u64 = weighted.iter().filter(|((start, end), _)| (*start..*end).contains(moment)).map(|(_, amount)| amount).sum();
                prop_assert_eq!(*level, expected);
            }
            prop_assert_eq!(levels.last().map_or(0, |last| last.1), 0);
            let highest = levels.iter().map(|(_, level)| *level).max();
            let thin = downsample(levels.clone(), count_max);
            prop_assert!(thin.len() <= count_max + 1, "{} of {count_max}", thin.len());
            prop_assert_eq!(thin.iter().map(|(_, level)| *level).max(), highest);
            prop_assert_eq!(thin.last(), levels.last());
        }

        #[test]
        fn distributing_loses_nothing(intervals in some_intervals(), parts in 1..30_usize) {
            let weighted: Vec<_> = intervals.iter().map(|interval| (*interval, 1000)).collect();
            let sum: f64 = distribute((0, 240), parts, weighted.iter().copied()).iter().sum();
            prop_assert!((sum - 1000.0 * intervals.len() as f64).abs() < 1e-6 * sum.max(1.0), "{sum}");
        }
    }
}
