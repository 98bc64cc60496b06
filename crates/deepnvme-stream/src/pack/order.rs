//! The order of tensors in the new file, by their names. Tensors that are used together become neighbours. This module
//! does no I/O.

use std::cmp::Reverse;
use std::ops::Range;

/// The properties of a tensor that decide its place.
#[derive(Clone, Debug)]
pub(super) struct TensorKey<'a> {
    pub(super) name: &'a str,
    pub(super) bytes: u64,
    pub(super) item_bytes: u64,
    /// Whether it is packed or quantised.
    pub(super) is_encoded: bool,
}

/// The tensors in their new order, in groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TensorOrder {
    pub(super) tensors: Vec<usize>,
    /// Ranges of `tensors`. Each begins at a page boundary if the format allows it.
    pub(super) groups: Vec<Range<usize>>,
    /// Whether each group is a layer.
    are_layers: Vec<bool>,
}

impl TensorOrder {
    /// The groups that are layers.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Range<usize>> {
        self.groups.iter().zip(&self.are_layers).filter(|(_, is_layer)| **is_layer).map(|(group, _)| group)
    }
}

/// The alignment of direct I/O.
const PAGE_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// Splits a name at its first number: `model.layers.10.mlp.weight` is layer 10 of `model.layers`.
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

/// Sorts layers by stem and number. In each layer, encoded tensors come last, since only they may have padding. Among
/// the tensors of either kind, experts come last, one by one. Tensors outside layers come first if they fill whole
/// pages, so that the next group begins at one; otherwise last.
pub(super) fn order(keys: &[TensorKey<'_>]) -> TensorOrder {
    let key = |index: &usize| {
        let key = &keys[*index];
        let (wide, place) = (Reverse(key.item_bytes), *index);
        match layer(key.name) {
            None => (2 * u8::from(!key.bytes.is_multiple_of(PAGE_BYTES)), "", 0, false, None, wide, place),
            Some((stem, number, rest)) => {
                let expert = layer(rest).map(|(stem, number, _)| (stem, number));
                (1, stem, number, key.is_encoded, expert, wide, place)
            }
        }
    };
    let mut tensors: Vec<usize> = (0..keys.len()).collect();
    tensors.sort_by_key(key);
    let group = |index: &usize| {
        let (rank, stem, number, ..) = key(index);
        (rank, stem, number)
    };
    let mut order = TensorOrder::default();
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
        let key = |name| TensorKey { name, bytes: 4096, item_bytes: 2, is_encoded: false };
        let keys: Vec<_> = names.iter().map(|name| key(name)).collect();
        order(&keys).tensors.into_iter().map(|index| names[index].to_owned()).collect()
    }

    #[test]
    fn layers_are_sorted_by_number_and_experts_are_contiguous() {
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
        fn every_tensor_has_one_place_and_layers_are_contiguous(
            names in proptest::collection::btree_set("[ab]{1,2}(\\.[ab0-9]{1,2}){0,4}", 0..40), seed: u64,
        ) {
            let names: Vec<String> = names.into_iter().collect();
            let mut random = fastrand::Rng::with_seed(seed);
            let key = |name: &'_ String| (name.clone(), random.u64(0..3) * 2048, random.bool());
            let drawn: Vec<_> = names.iter().map(key).collect();
            let keys: Vec<_> = drawn.iter().map(|(name, bytes, is_encoded)| {
                TensorKey { name, bytes: *bytes, item_bytes: 2, is_encoded: *is_encoded }
            }).collect();
            let order = order(&keys);
            let mut sorted = order.tensors.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..keys.len()).collect::<Vec<_>>());
            let mut at = 0;
            let mut seen = std::collections::HashSet::new();
            for group in &order.groups {
                prop_assert_eq!(group.start, at);
                at = group.end;
                let of = |index: &usize| layer(keys[*index].name).map(|(stem, number, _)| (stem, number));
                let first = of(&order.tensors[group.start]);
                prop_assert!(order.tensors[group.clone()].iter().all(|index| of(index) == first));
                prop_assert!(first.is_none() || seen.insert(first), "a layer is in one place");
            }
            prop_assert_eq!(at, keys.len());
        }
    }
}
