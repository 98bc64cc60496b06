//! torch archives: ZIP files of uncompressed records, as `torch.save` writes them.
//!
//! The records of an archive named `model` are `model/data.pkl` (the objects), `model/data/0`, `model/data/1`, ... (the
//! bytes of one storage each) and a few small ones. `zip` reads and writes ZIP headers, `plan` lays an archive out
//! before its first byte is written, `directory` parses one.
//!
//! Formats: PKWARE's APPNOTE 6.3 for ZIP and ZIP64; `torch/serialization.py` and `caffe2/serialize` of PyTorch for the
//! meaning of the records.

mod directory;
mod plan;
mod zip;

pub use directory::{Directory, End, Record, TAIL_BYTES_MAX, find_end};
pub use plan::{ArchivePlan, ENTRY_CRC32, HEADER_CRC32, RecordPlan, RecordSpec, local_header};
pub use zip::{LOCAL_BYTES, LocalHeader};

/// The record of the objects.
pub const PICKLE: &str = "data.pkl";
/// Prefix of the records of storages.
pub const STORAGES: &str = "data/";

/// Returns the root folder for a file name, as torch chooses it: the name up to its last dot.
#[must_use]
pub fn root_of(file_name: &str) -> String {
    let stem = file_name.rsplit_once('.').map_or(file_name, |(stem, _)| stem);
    if stem.is_empty() { "archive".into() } else { stem.into() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_root_is_the_name_without_its_ending() {
        for (name, root) in
            [("model.pt", "model"), ("a.b.pt", "a.b"), ("model", "model"), (".pt", "archive"), ("", "archive")]
        {
            assert_eq!(super::root_of(name), root, "{name}");
        }
    }
}
