//! A file as a sequence of spans, split into pieces that can be written independently. Pure.
//!
//! Most pieces are known from the start. A piece with a header that contains the checksum of a large record is late: it
//! is written after the record was hashed. All cuts are multiples of [`ALIGNMENT_BYTES`], so no piece needs a
//! read-modify-write.

use std::ops::Range;

/// The content of a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Content {
    /// The data of a record.
    Record(usize),
    /// The header of a record, which contains its checksum.
    Header(usize),
    /// The index, which contains all checksums that the file stores.
    Index,
    /// Zeros.
    Gap,
}

/// A part of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileSpan {
    pub(crate) offset: u64,
    bytes: u64,
    pub(crate) content: Content,
}

impl FileSpan {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// The spans of a file, in order and without holes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans {
    spans: Vec<FileSpan>,
}

/// The pieces of a file, by the time of writing.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Written without waiting for checksums.
    pub(crate) early: Vec<Range<u64>>,
    /// Written when all records have been hashed.
    pub(crate) late: Vec<Range<u64>>,
}

impl Pieces {
    /// Clips the pieces to a range, whose ends are cuts, multiples of [`ALIGNMENT_BYTES`] or the end of the file.
    pub(crate) fn within(self, range: &Range<u64>) -> Self {
        let clip = |pieces: Vec<Range<u64>>| {
            let clipped = pieces.into_iter().map(|piece| piece.start.max(range.start)..piece.end.min(range.end));
            clipped.filter(|piece| piece.start < piece.end).collect()
        };
        Self { early: clip(self.early), late: clip(self.late) }
    }
}

/// Cuts are multiples of this: the largest block that direct I/O requires.
pub(crate) const ALIGNMENT_BYTES: u64 = deepnvme_format::ALIGNMENT_LARGE;

impl Spans {
    /// Appends a span. A hole before it becomes a gap.
    pub(crate) fn push(&mut self, offset: u64, bytes: u64, content: Content) {
        let end = self.file_bytes();
        debug_assert!(offset >= end, "spans come in order");
        if offset > end {
            self.spans.push(FileSpan { offset: end, bytes: offset - end, content: Content::Gap });
        }
        if bytes > 0 {
            self.spans.push(FileSpan { offset, bytes, content });
        }
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.spans.last().map_or(0, FileSpan::end)
    }

    /// Returns the offset of the index.
    pub(crate) fn offset_of_index(&self) -> Option<u64> {
        self.spans.iter().find(|span| span.content == Content::Index).map(|span| span.offset)
    }

    /// Returns the spans that overlap a range.
    pub(crate) fn within(&self, range: &Range<u64>) -> &[FileSpan] {
        let from = self.spans.partition_point(|span| span.end() <= range.start);
        let to = self.spans.partition_point(|span| span.offset < range.end);
        &self.spans[from..to]
    }

    /// Splits the file into pieces of at most `piece_bytes`, a multiple of [`ALIGNMENT_BYTES`].
    pub(crate) fn pieces(&self, piece_bytes: u64, is_late: impl Fn(Content) -> bool) -> Pieces {
        let file_bytes = self.file_bytes();
        let mut late: Vec<Range<u64>> = Vec::new();
        for span in self.spans.iter().filter(|span| is_late(span.content)) {
            let start = span.offset / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
            let end = span.end().next_multiple_of(ALIGNMENT_BYTES).min(file_bytes);
            match late.last_mut() {
                Some(last) if last.end >= start => last.end = last.end.max(end),
                _ => late.push(start..end),
            }
        }
        let mut pieces = Pieces::default();
        let mut at = 0;
        for range in late.iter().chain(std::iter::once(&(file_bytes..file_bytes))) {
            cut(at..range.start, piece_bytes, &mut pieces.early);
            cut(range.clone(), piece_bytes, &mut pieces.late);
            at = range.end;
        }
        pieces
    }
}

/// Splits a range at multiples of `piece_bytes`.
fn cut(range: Range<u64>, piece_bytes: u64, pieces: &mut Vec<Range<u64>>) {
    let mut at = range.start;
    while at < range.end {
        let end = ((at / piece_bytes + 1) * piece_bytes).min(range.end);
        pieces.push(at..end);
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIECE_BYTES: u64 = 4 * ALIGNMENT_BYTES;

    proptest! {
        #[test]
        fn pieces_cover_the_file_once(sizes in proptest::collection::vec((0..20_000u64, 0..5000u64, any::<bool>()), 0..20)) {
            let mut spans = Spans::default();
            for (index, (bytes, gap, is_header)) in sizes.iter().enumerate() {
                let content = if *is_header { Content::Header(index) } else { Content::Record(index) };
                spans.push(spans.file_bytes() + gap, *bytes, content);
            }
            let is_late = |content| matches!(content, Content::Header(_));
            let pieces = spans.pieces(PIECE_BYTES, is_late);
            let mut all: Vec<_> = pieces.early.iter().chain(&pieces.late).cloned().collect();
            all.sort_by_key(|piece| piece.start);
            let mut at = 0;
            for piece in &all {
                prop_assert_eq!(piece.start, at);
                prop_assert!(piece.end > piece.start && piece.end - piece.start <= PIECE_BYTES);
                prop_assert_eq!(piece.start % ALIGNMENT_BYTES, 0);
                at = piece.end;
                let inside = spans.within(piece);
                prop_assert!(inside.first().unwrap().offset <= piece.start);
                prop_assert!(inside.last().unwrap().end() >= piece.end);
                prop_assert!(inside.windows(2).all(|pair| pair[0].end() == pair[1].offset));
            }
            prop_assert_eq!(at, spans.file_bytes());
            for piece in &pieces.early {
                prop_assert!(!spans.within(piece).iter().any(|span| is_late(span.content)));
            }
        }
    }
}
