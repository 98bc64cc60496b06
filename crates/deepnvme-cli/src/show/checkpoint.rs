//! Inspections and verifications as lines to read.

use std::collections::BTreeMap;
use std::fmt::Write;

use deepnvme_io::shown;
use deepnvme_perf::units::{bytes_text, gb};

use crate::inspect::{Conversion, Coverage, Inspection, Tensor, Verdict, Verification};

/// A part of a name's path: what lies below it, in the order of the file.
#[derive(Default)]
struct Branch<'a> {
    below: Vec<(&'a str, Branch<'a>)>,
    places: BTreeMap<&'a str, usize>,
    leaf: Option<&'a Tensor>,
    tensors: usize,
    bytes: u64,
}

impl<'a> Branch<'a> {
    fn add(&mut self, path: &[&'a str], tensor: &'a Tensor) {
        self.tensors += 1;
        self.bytes += tensor.bytes;
        let Some((first, rest)) = path.split_first() else {
            self.leaf = Some(tensor);
            return;
        };
        let next = self.below.len();
        let place = *self.places.entry(first).or_insert(next);
        if place == next {
            self.below.push((first, Branch::default()));
        }
        self.below[place].1.add(rest, tensor);
    }

    fn draw(&self, indent: usize, depth: usize, out: &mut String) {
        for (part, branch) in &self.below {
            // A way without a fork is one line.
            let (mut name, mut branch) = (shown::text(part).to_string(), branch);
            while branch.leaf.is_none() && branch.below.len() == 1 {
                let (part, next) = &branch.below[0];
                let _ = write!(name, ".{}", shown::text(part));
                branch = next;
            }
            let blank = "  ".repeat(indent);
            match branch.leaf {
                Some(tensor) if branch.below.is_empty() => {
                    let shared = if tensor.is_shared { "  shares its storage" } else { "" };
                    let sizes: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
                    let sizes = format!("[{}]", sizes.join(", "));
                    let bytes = bytes_text(tensor.bytes);
                    let label = format!("{blank}{name}");
                    let _ = writeln!(out, "{label:<44} {:<10} {sizes:<20} {bytes}{shared}", tensor.dtype);
                }
                _ => {
                    let label = format!("{blank}{name}");
                    let (tensors, bytes) = (branch.tensors, bytes_text(branch.bytes));
                    let _ = writeln!(out, "{label:<44} {tensors} tensors, {bytes}");
                    if depth > 1 {
                        branch.draw(indent + 1, depth - 1, out);
                    }
                }
            }
        }
    }
}

/// Each file as a tree of names with totals, `depth` levels of it.
#[must_use]
pub fn inspection(files: &[Inspection], depth: usize) -> String {
    let mut out = String::new();
    for file in files {
        let sums = match (file.has_checksums, file.has_stale_checksums) {
            (true, _) => "with checksums",
            (false, true) => "with checksums that were made for another file",
            (false, false) => "without checksums of its own",
        };
        let kind = if file.format == "torch" { "torch archive" } else { "safetensors" };
        let (count, bytes) = (file.tensors.len(), bytes_text(file.file_bytes));
        let _ = writeln!(out, "{}: {kind}, {bytes}, {count} tensors, {sums}", shown::path(&file.path));
        for (key, value) in &file.metadata {
            let _ = writeln!(out, "  {}: {}", shown::text(key), shown::text(value));
        }
        let mut root = Branch::default();
        for tensor in &file.tensors {
            let path: Vec<&str> = tensor.name.split('.').collect();
            root.add(&path, tensor);
        }
        root.draw(1, depth, &mut out);
    }
    if files.len() > 1 {
        let (tensors, bytes) = files
            .iter()
            .fold((0, 0), |(tensors, bytes), file| (tensors + file.tensors.len(), bytes + file.tensor_bytes));
        let _ = writeln!(out, "in all {} files, {tensors} tensors, {}", files.len(), bytes_text(bytes));
    }
    out
}

/// A line for each file, and what is wrong with it.
#[must_use]
pub fn verification(files: &[Verification]) -> String {
    let mut out = String::new();
    for file in files {
        let finding = shown::text(file.finding.as_deref().unwrap_or_default());
        let _ = match file.verdict {
            Verdict::Damaged => writeln!(out, "DAMAGED  {finding}"),
            Verdict::Unverifiable => writeln!(out, "unknown  {finding}"),
            Verdict::Sound => {
                let speed = gb(file.bytes) / file.seconds.max(1e-9);
                let (path, bytes) = (shown::path(&file.path), bytes_text(file.bytes));
                let covered = match file.coverage {
                    Coverage::File => "",
                    _ => "; names, types and shapes have no checksum in this file: save it again to have one",
                };
                writeln!(out, "ok       {path}: {bytes} compared, {speed:.2} GB/s{covered}")
            }
        };
    }
    out
}

/// How many of the names that are left out are shown.
const LEFT_OUT_SHOWN: usize = 10;

/// What came of a conversion, and what did not come along.
#[must_use]
pub fn conversion(converted: &Conversion) -> String {
    let Conversion { target, file_bytes, tensors, left_out, seconds, .. } = converted;
    let speed = gb(*file_bytes) / seconds.max(1e-9);
    let bytes = bytes_text(*file_bytes);
    let mut out = format!("{}: {tensors} tensors, {bytes}, {speed:.2} GB/s\n", shown::path(target));
    for (name, kind) in left_out.iter().take(LEFT_OUT_SHOWN) {
        let _ = writeln!(out, "left out, since it is no tensor: {} ({kind})", shown::text(name));
    }
    if left_out.len() > LEFT_OUT_SHOWN {
        let _ = writeln!(out, "and {} more; --json has all", left_out.len() - LEFT_OUT_SHOWN);
    }
    out
}
