//! Which tensor lies behind which: what is used together lies together. Pure; it looks at names only.

use std::cmp::Reverse;
use std::ops::Range;

/// A tensor, as far as its place depends on it.
#[derive(Clone, Debug)]
pub(super) struct Member<'a> {
    pub(super) name: &'a str,
    pub(super) bytes: u64,
    pub(super) item_bytes: u64,
    /// Whether it becomes bytes of another form.
    pub(super) is_encoded: bool,
}

/// The tensors in their new order, and which of those belong together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) tensors: Vec<usize>,
    /// Ranges of `tensors`; each begins at a page, as far as the file's format lets it.
    pub(super) groups: Vec<Range<usize>>,
    /// Whether each is a layer.
    are_layers: Vec<bool>,
}

impl Order {
    /// The groups that are layers.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Range<usize>> {
        self.groups.iter().zip(&self.are_layers).filter(|(_, is_layer)| **is_layer).map(|(group, _)| group)
    }
}

/// What direct I/O asks for.
const PAGE_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// A name up to its first number, and that number: `model.layers.10.mlp.weight` is in layer 10 of `model.layers`.
pub(super) fn layer(name: &str) -> Option<(&str, u64, &str)> {
    let mut at = 0;
    for part in name.split('.') {
        let end = at + part.len();
        let number = Some(part).filter(|part| at > 0 && part.bytes().all(|byte| byte.is_ascii_digit()));
        if let Some(number) = number.and_then(|part| part.parse().ok()) {
            return Some((&name[..at - 1], number, name.get(end + 1..).unwrap_or("")));
        }
        at = end + 1;
    }
    None
}

/// Layers in the order of their numbers; in one, plain tensors first, then the experts one by one. What is in no layer comes
/// first where it has whole pages, so that those behind it begin with one, and last where it has not.
pub(super) fn order(members: &[Member<'_>]) -> Order {
    let key = |index: &usize| {
        let member = &members[*index];
        let (wide, place) = (Reverse(member.item_bytes), *index);
        match layer(member.name) {
            None => (2 * u8::from(!member.bytes.is_multiple_of(PAGE_BYTES)), "", 0, false, None, wide, place),
            Some((stem, number, rest)) => {
                let expert = layer(rest).map(|(stem, number, _)| (stem, number));
                (1, stem, number, member.is_encoded, expert, wide, place)
            }
        }
    };
    let mut tensors: Vec<usize> = (0..members.len()).collect();
    tensors.sort_by_key(key);
    let group = |index: &usize| {
        let (rank, stem, number, ..) = key(index);
        (rank, stem, number)
    };
    let mut order = Order::default();
    let mut at = 0;
    for chunk in tensors.chunk_by(|one, other| group(one) == group(other)) {
        order.are_layers.push(group(&chunk[0]).0 == 1);
        order.groups.push(at..at + chunk.len());
        at += chunk.len();
    }
    order.tensors = tensors;
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ordered(names: &[&str]) -> Vec<String> {
        let member = |name| Member { name, bytes: 4096, item_bytes: 2, is_encoded: false };
        let members: Vec<_> = names.iter().map(|name| member(name)).collect();
        order(&members).tensors.into_iter().map(|index| names[index].to_owned()).collect()
    }

    #[test]
    fn layers_come_in_the_order_of_their_numbers_and_experts_one_by_one() {
        let shuffled = [
            "model.layers.10.mlp.experts.1.w2",
            "model.layers.2.mlp.experts.10.w1",
            "model.layers.2.mlp.experts.9.w1",
            "model.layers.2.mlp.experts.10.w2",
            "model.layers.2.norm",
            "lm_head.weight",
            "model.layers.2.mlp.experts.9.w2",
            "model.layers.10.norm",
        ];
        let expected = [
            "lm_head.weight",
            "model.layers.2.norm",
            "model.layers.2.mlp.experts.9.w1",
            "model.layers.2.mlp.experts.9.w2",
            "model.layers.2.mlp.experts.10.w1",
            "model.layers.2.mlp.experts.10.w2",
            "model.layers.10.norm",
            "model.layers.10.mlp.experts.1.w2",
        ];
        assert_eq!(ordered(&shuffled), expected);
        assert_eq!(layer("0.weight"), None, "a bare list of layers has no name to go by");
        assert_eq!(layer("h.3"), Some(("h", 3, "")));
        assert_eq!(layer("a.99999999999999999999.b.1.c"), Some(("a.99999999999999999999.b", 1, "c")));
    }

    proptest! {
        #[test]
        fn every_tensor_has_one_place_and_layers_are_whole(
            names in proptest::collection::btree_set("[ab]{1,2}(\\.[ab0-9]{1,2}){0,4}", 0..40), seed: u64,
        ) {
            let names: Vec<String> = names.into_iter().collect();
            let mut random = fastrand::Rng::with_seed(seed);
            let member = |name: &'_ String| (name.clone(), random.u64(0..3) * 2048, random.bool());
            let drawn: Vec<_> = names.iter().map(member).collect();
            let members: Vec<_> = drawn.iter().map(|(name, bytes, is_encoded)| {
                Member { name, bytes: *bytes, item_bytes: 2, is_encoded: *is_encoded }
            }).collect();
            let order = order(&members);
            let mut sorted = order.tensors.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..members.len()).collect::<Vec<_>>());
            let mut at = 0;
            let mut seen = std::collections::HashSet::new();
            for group in &order.groups {
                prop_assert_eq!(group.start, at);
                at = group.end;
                let of = |index: &usize| layer(members[*index].name).map(|(stem, number, _)| (stem, number));
                let first = of(&order.tensors[group.start]);
                prop_assert!(order.tensors[group.clone()].iter().all(|index| of(index) == first));
                prop_assert!(first.is_none() || seen.insert(first), "a layer is in one place");
            }
            prop_assert_eq!(at, members.len());
        }
    }
}
