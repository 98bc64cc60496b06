//! The files that a list of parts or an index of shards names. Pure.

use std::collections::BTreeSet;

use serde_json::Value;

/// Returns the files in a list of parts, in order. `None` if it is not such a list.
#[must_use]
pub fn parts(text: &[u8]) -> Option<Vec<String>> {
    let list: Value = serde_json::from_slice(text).ok()?;
    list.get("parts")?.as_array()?.iter().map(|part| part.as_str().map(str::to_owned)).collect()
}

/// Returns the files in the index of a sharded folder. `None` if it is not such an index, or a name is not a shard's.
/// Each entry has a list of chunks, `[offsets, sizes, [file, tensor]]`, or bytes, `[file, tensor]`.
#[must_use]
pub fn shards(text: &[u8]) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_slice(text).ok()?;
    let mut files = BTreeSet::new();
    for entry in index.get("entries")?.as_object()?.values() {
        let places: Vec<&Value> = match (entry.get("bytes"), entry.get("chunks")) {
            (Some(place), _) => vec![place],
            (None, Some(chunks)) => chunks.as_array()?.iter().map(|chunk| chunk.get(2)).collect::<Option<_>>()?,
            (None, None) => return None,
        };
        for place in places {
            let file = place.get(0)?.as_str()?;
            if !is_shard(file) {
                return None;
            }
            files.insert(file.to_owned());
        }
    }
    Some(files)
}

fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".safetensors"));
    numbers.and_then(|numbers| numbers.split_once('-')).is_some_and(|(rank, token)| {
        rank.len() >= 5
            && rank.bytes().all(|byte| byte.is_ascii_digit())
            && token.len() >= 8
            && token.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}
