//! The results of `inspect`, `verify` and `convert` as text.

use std::collections::BTreeMap;
use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_perf::units::{bytes_text, gb};
use deepnvme_rows::PACKED_KEY;

use crate::inspect::{Conversion, Coverage, Inspection, PickledValue, Tensor, Verdict, Verification};

/// An entry of a file.
#[derive(Clone, Copy)]
enum Leaf<'a> {
    Tensor(&'a Tensor),
    Value(&'a PickledValue),
}

/// Levels of the tree of names. Names come from the file, and the tree is walked recursively.
const LEVELS_MAX: usize = 100;

/// A node in the tree of names, with its children in the order of the file.
#[derive(Default)]
struct Node<'a> {
    children: Vec<(&'a str, Node<'a>)>,
    child_index: BTreeMap<&'a str, usize>,
    leaf: Option<Leaf<'a>>,
    tensors: usize,
    values: usize,
    bytes: u64,
}

impl<'a> Node<'a> {
    fn add(&mut self, path: &[&'a str], leaf: Leaf<'a>) {
        match leaf {
            Leaf::Tensor(tensor) => (self.tensors, self.bytes) = (self.tensors + 1, self.bytes + tensor.bytes),
            Leaf::Value(value) => (self.values, self.bytes) = (self.values + 1, self.bytes + value.bytes),
        }
        let Some((first, rest)) = path.split_first() else {
            self.leaf = Some(leaf);
            return;
        };
        let next = self.children.len();
        let index = *self.child_index.entry(first).or_insert(next);
        if index == next {
            self.children.push((first, Node::default()));
        }
        self.children[index].1.add(rest, leaf);
    }

    fn draw(&self, indent: usize, depth: usize, out: &mut String) {
        for (part, node) in &self.children {
            // Nodes with one child are joined into one line.
            let (mut name, mut node) = (display::text(part).to_string(), node);
            while node.leaf.is_none() && node.children.len() == 1 {
                let (part, next) = &node.children[0];
                let _ = write!(name, ".{}", display::text(part));
                node = next;
            }
            let blank = "  ".repeat(indent);
            match node.leaf {
                Some(Leaf::Value(value)) if node.children.is_empty() => {
                    let (label, bytes) = (format!("{blank}{name}"), bytes_text(value.bytes));
                    let _ = writeln!(out, "{label:<44} {:<10} {:<20} {bytes}", "value", "");
                }
                Some(Leaf::Tensor(tensor)) if node.children.is_empty() => {
                    let remark = match (tensor.is_shared, tensor.is_packed) {
                        (true, _) => "  shares its storage",
                        (_, true) => "  packed",
                        _ => "",
                    };
                    let sizes: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
                    let sizes = format!("[{}]", sizes.join(", "));
                    let bytes = bytes_text(tensor.bytes);
                    let label = format!("{blank}{name}");
                    let _ = writeln!(out, "{label:<44} {:<10} {sizes:<20} {bytes}{remark}", tensor.dtype);
                }
                _ => {
                    let label = format!("{blank}{name}");
                    let (entries, bytes) = (entries_text(node.tensors, node.values), bytes_text(node.bytes));
                    let _ = writeln!(out, "{label:<44} {entries}, {bytes}");
                    if depth > 1 {
                        node.draw(indent + 1, depth - 1, out);
                    }
                }
            }
        }
    }
}

/// Draws each file as a tree of names with totals, `depth` levels deep.
#[must_use]
pub fn draw_inspections(files: &[Inspection], depth: usize) -> String {
    let mut out = String::new();
    for file in files {
        let sums = match (file.has_checksums, file.has_stale_checksums) {
            (true, _) => "with checksums",
            (false, true) => "with checksums of another file",
            (false, false) if is_packed_table(file) => "with a checksum in each block",
            (false, false) => "without checksums of its own",
        };
        let kind = if file.format == "torch" { "torch archive" } else { "safetensors" };
        let (entries, bytes) = (entries_text(file.tensors.len(), file.values.len()), bytes_text(file.file_bytes));
        let _ = writeln!(out, "{}: {kind}, {bytes}, {entries}, {sums}", display::path(&file.path));
        for (key, value) in &file.metadata {
            let _ = match value.len() {
                METADATA_BYTES_MAX.. if depth < usize::MAX => {
                    writeln!(out, "  {}: {} (--all shows it)", display::text(key), bytes_text(value.len() as u64))
                }
                _ => writeln!(out, "  {}: {}", display::text(key), display::text(value)),
            };
        }
        let mut root = Node::default();
        let tensors = file.tensors.iter().map(|tensor| (&tensor.name, Leaf::Tensor(tensor)));
        let values = file.values.iter().map(|value| (&value.name, Leaf::Value(value)));
        for (name, leaf) in tensors.chain(values) {
            let path: Vec<&str> = name.splitn(LEVELS_MAX, '.').collect();
            root.add(&path, leaf);
        }
        root.draw(1, depth, &mut out);
    }
    if files.len() > 1 {
        let tensors = files.iter().map(|file| file.tensors.len()).sum();
        let values = files.iter().map(|file| file.values.len()).sum();
        let bytes = files.iter().map(|file| file.tensor_bytes).sum();
        let _ = writeln!(out, "total: {} files, {}, {}", files.len(), entries_text(tensors, values), bytes_text(bytes));
    }
    out
}

/// Returns whether the file is a packed table of rows, whose blocks have checksums.
fn is_packed_table(file: &Inspection) -> bool {
    file.metadata.iter().any(|(key, _)| key == PACKED_KEY)
}

/// Bytes of a value of metadata from which on only its size is shown.
const METADATA_BYTES_MAX: usize = 512;
/// Bytes of a file from which on the speed of its verification is shown.
const VERIFIED_SPEED_BYTES_MIN: u64 = 1 << 20;

/// Draws a line for each file, with the damage found.
#[must_use]
pub fn draw_verifications(files: &[Verification]) -> String {
    let mut out = String::new();
    for file in files {
        let finding = display::text(file.finding.as_deref().unwrap_or_default());
        let _ = match file.verdict {
            Verdict::Damaged | Verdict::Unverifiable | Verdict::Unreadable => {
                writeln!(out, "{:<12} {finding}", file.verdict.name())
            }
            Verdict::Sound => {
                let path = display::path(&file.path);
                let compared = match file.bytes {
                    0 => "metadata compared; it has no bytes of tensors".into(),
                    bytes => format!("{} compared", bytes_text(bytes)),
                };
                let mut speed = String::new();
                if file.bytes >= VERIFIED_SPEED_BYTES_MIN {
                    speed = format!(", {:.2} GB/s", gb(file.bytes) / file.seconds.max(1e-9));
                }
                let covered = match file.coverage {
                    Coverage::File => "",
                    _ => "; names, types and shapes have no checksum: save it with deepnvme.save to add one",
                };
                writeln!(out, "{:<12} {path}: {compared}{speed}{covered}", file.verdict.name())
            }
        };
    }
    out
}

/// Counts the files that are not sound, worst first: `damaged: 1, unreadable: 1, of 5`. `None` if all are sound.
#[must_use]
pub fn draw_failure(files: &[Verification]) -> Option<String> {
    let worst_first = [Verdict::Damaged, Verdict::Unreadable, Verdict::Unverifiable];
    let counts = worst_first.map(|verdict| (verdict, files.iter().filter(|file| file.verdict == verdict).count()));
    let counts: Vec<_> = counts
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(verdict, count)| format!("{}: {count}", verdict.name()))
        .collect();
    match counts.as_slice() {
        [] => None,
        [one] => Some(format!("{one} of {}", files.len())),
        several => Some(format!("{}, of {}", several.join(", "), files.len())),
    }
}

/// Omitted names that are shown.
const OMITTED_SHOWN_MAX: usize = 10;

/// Bytes of a conversion from which on its speed is shown.
const SPEED_BYTES_MIN: u64 = 16 << 20;

/// Draws the result of a conversion, with the omitted entries.
#[must_use]
pub fn draw_conversion(converted: &Conversion) -> String {
    let Conversion { target, file_bytes, tensors, left_out, seconds, .. } = converted;
    let (tensors, bytes) = (tensors_text(*tensors), bytes_text(*file_bytes));
    let mut out = format!("{}: {tensors}, {bytes}", display::path(target));
    // The time of a small file is that of opening it.
    if *file_bytes >= SPEED_BYTES_MIN {
        let _ = write!(out, ", {:.2} GB/s", gb(*file_bytes) / seconds.max(1e-9));
    }
    out.push('\n');
    for (name, kind) in left_out.iter().take(OMITTED_SHOWN_MAX) {
        let _ = writeln!(out, "omitted, not a tensor: {} ({kind})", display::text(name));
    }
    if left_out.len() > OMITTED_SHOWN_MAX {
        let _ = writeln!(out, "and {} more; --json lists all", left_out.len() - OMITTED_SHOWN_MAX);
    }
    out
}

/// Names the numbers of tensors and of values.
fn entries_text(tensors: usize, values: usize) -> String {
    let values_text = if values == 1 { "1 value".into() } else { format!("{values} values") };
    match (tensors, values) {
        (_, 0) => tensors_text(tensors),
        (0, _) => values_text,
        _ => format!("{} and {values_text}", tensors_text(tensors)),
    }
}

/// Names a number of tensors.
fn tensors_text(count: usize) -> String {
    if count == 1 { "1 tensor".into() } else { format!("{count} tensors") }
}
