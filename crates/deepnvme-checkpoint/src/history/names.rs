//! The names of checkpoints. Pure.
//!
//! `step-00000010.pt` is the first save of its step, `step-00000010-1.pt` the next one. A sharded checkpoint is a
//! folder without a suffix. A checkpoint in parts consists of `.part-03-of-16` files and a list of them.

use deepnvme_file::replace::TEMPORARY_MARKER;

/// Suffix of a list of parts.
pub const PARTS_LIST: &str = ".stripes.json";
/// The name of a folder's list of shards.
pub const SHARDS_LIST: &str = "deepnvme.json";
/// Key of the ownership record in that list.
pub const SHARDS_RECORD: &str = "deepnvme.owned";

/// Builds a checkpoint's name. `again` counts the repeated saves of a step.
#[must_use]
pub(super) fn name(step: u64, suffix: &str, again: u64) -> String {
    match again {
        0 => format!("step-{step:08}{suffix}"),
        _ => format!("step-{step:08}-{again}{suffix}"),
    }
}

/// Returns whether the name fits a checkpoint, its list or one of its parts.
#[must_use]
pub fn is_checkpoint(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("step-") else { return false };
    let (numbers, suffix) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
    let (step, again) = numbers.split_once('-').unwrap_or((numbers, "0"));
    is_number(step, 8) && is_number(again, 1) && is_suffix(suffix)
}

fn is_suffix(suffix: &str) -> bool {
    let Some(rest) = suffix.strip_prefix(".pt").or_else(|| suffix.strip_prefix(".safetensors")) else {
        return suffix.is_empty();
    };
    let numbers = rest.strip_prefix(".part-").and_then(|numbers| numbers.split_once("-of-"));
    rest.is_empty()
        || rest == PARTS_LIST
        || numbers.is_some_and(|(part, parts)| is_number(part, 2) && is_number(parts, 2))
}

fn is_number(text: &str, digits: usize) -> bool {
    text.len() >= digits && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether `private` is a private name of a file that will be called `name`.
#[must_use]
pub(super) fn is_private_of(private: &str, name: &str) -> bool {
    let rest = private.strip_prefix('.').and_then(|rest| rest.strip_prefix(name));
    rest.and_then(|rest| rest.strip_prefix(TEMPORARY_MARKER))
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'))
}

/// Returns whether `private` is a private name of a checkpoint's file. The file may get a different final name, if the
/// stated one has been taken since.
#[must_use]
pub(super) fn is_private(private: &str) -> bool {
    let stated = private.strip_prefix('.').and_then(|rest| rest.split_once(TEMPORARY_MARKER));
    stated.is_some_and(|(name, _)| is_checkpoint(name) && is_private_of(private, name))
}

/// Returns the first name of a step that no existing file uses. `any_name` returns whether an existing name passes a
/// test.
#[must_use]
pub(super) fn free_name(step: u64, suffix: &str, any_name: impl Fn(&dyn Fn(&str) -> bool) -> bool) -> String {
    let mut again = 0;
    loop {
        let name = name(step, suffix, again);
        let whole = name.strip_suffix(PARTS_LIST).unwrap_or(&name).to_owned();
        let is_of_it = |other: &str| {
            other.strip_prefix(&whole).is_some_and(|rest| {
                rest.is_empty() || rest == PARTS_LIST || (rest.starts_with(".part-") && is_checkpoint(other))
            })
        };
        if !any_name(&is_of_it) {
            return name;
        }
        again += 1;
    }
}

/// Returns the suffix of a checkpoint's name, from the first dot on.
#[must_use]
pub(super) fn suffix_of(name: &str) -> &str {
    &name[name.find('.').unwrap_or(name.len())..]
}
