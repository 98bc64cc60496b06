//! Conjugation and negation without a change of the bytes.

/// Signs that torch flips lazily: the elements are those of the storage with these signs flipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Signs {
    /// Whether the tensor is conjugated.
    pub is_conj: bool,
    /// Whether the tensor is negated.
    pub is_neg: bool,
}

impl Signs {
    /// Whether the elements equal those of the storage.
    #[must_use]
    pub fn are_plain(self) -> bool {
        !(self.is_conj || self.is_neg)
    }
}
