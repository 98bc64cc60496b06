//! Stretches that are converted on the thread that waits for them: each is read once, whoever wants how much of it.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Buffer, RegionMut, Reserved};
use deepnvme_io::{Engine, Error as IoError, Pending, ReadItem};

use crate::arrival::{Workspace, convert};
use crate::error::{Error, Result};
use crate::source::Source;
use crate::sync::Instant;
use crate::unit::{BLOCK_BYTES, Conversion};

/// Bytes that are on their way while those before them are converted.
const WAVE_BYTES: usize = 16 << 20;

/// Memory that the next call uses again.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    workspace: Workspace,
}

/// What it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) bytes: u64,
    pub(crate) disk_busy: Duration,
    pub(crate) converting: Duration,
}

/// Reads on their way, and for each the conversions that it is for and what is left of its buffer.
struct Wave<'a> {
    pending: Pending<Vec<RegionMut>>,
    reads: Vec<(&'a [Conversion], RegionMut)>,
    started: Instant,
}

impl Gather {
    /// Reads and converts all of these; their places are places of `memory`.
    pub(crate) fn run(
        &mut self,
        engine: &Engine,
        sources: &[Source],
        mut conversions: Vec<Conversion>,
        memory: &Reserved,
    ) -> Result<Gathered> {
        let stretch = |each: &Conversion| (each.source, each.offset, each.bytes);
        conversions.sort_unstable_by_key(stretch);
        let reads: Vec<&[Conversion]> = conversions.chunk_by(|one, other| stretch(one) == stretch(other)).collect();
        let buffer_bytes = reads.iter().map(|read| read[0].bytes).max().unwrap_or(0) + BLOCK_BYTES as usize;
        let (mut spare, mut gathered) = (Vec::new(), Gathered::default());
        let mut on_its_way: Option<Wave<'_>> = None;
        let mut waves = reads.chunks((WAVE_BYTES / buffer_bytes).max(1));
        loop {
            let next = waves.next().map(|reads| start(engine, sources, reads, buffer_bytes, &mut spare)).transpose()?;
            let is_over = next.is_none();
            if let Some(wave) = std::mem::replace(&mut on_its_way, next) {
                self.finish(wave, sources, memory, &mut spare, &mut gathered)?;
            }
            if is_over {
                return Ok(gathered);
            }
        }
    }

    fn finish(
        &mut self,
        wave: Wave<'_>,
        sources: &[Source],
        memory: &Reserved,
        spare: &mut Vec<Buffer>,
        gathered: &mut Gathered,
    ) -> Result<()> {
        let (home, transfer) = wave.pending.wait();
        let transfer = transfer?;
        gathered.disk_busy += transfer.finished.saturating_duration_since(wave.started);
        let began = Instant::now();
        for (target, (conversions, rest)) in home.into_iter().flatten().zip(wave.reads) {
            let buffer = target.join(rest).ok().and_then(|whole| whole.into_buffer().ok());
            let Some(buffer) = buffer else {
                return Err(Error::Plan("the memory of a read did not come home".into()));
            };
            let (head, bytes) = (conversions[0].head(), conversions[0].bytes);
            gathered.bytes += bytes as u64;
            for conversion in conversions {
                let target = memory.region_mut(conversion.at..conversion.at + conversion.target_bytes);
                let put = |at: usize, step: &[u8]| {
                    target.copy_from_slice(at, step);
                    Ok::<(), deepnvme_codec::Error>(())
                };
                let source = &buffer.as_slice()[head..head + bytes];
                convert(conversion, source, &mut self.workspace, put).map_err(|source| Error::Corrupt {
                    path: sources[conversion.source].file().path().to_path_buf(),
                    offset: conversion.offset,
                    source,
                })?;
            }
            spare.push(buffer);
        }
        gathered.converting += began.elapsed();
        Ok(())
    }
}

fn start<'a>(
    engine: &Engine,
    sources: &[Source],
    reads: &[&'a [Conversion]],
    buffer_bytes: usize,
    spare: &mut Vec<Buffer>,
) -> Result<Wave<'a>> {
    let (mut items, mut kept) = (Vec::with_capacity(reads.len()), Vec::with_capacity(reads.len()));
    for conversions in reads {
        let first = &conversions[0];
        let buffer = spare.pop().map_or_else(|| Buffer::zeroed(buffer_bytes), Ok);
        let buffer = buffer.map_err(|error| IoError::from_io("allocate", &error))?;
        let (target, rest) = buffer.into_region().split_at(first.head() + first.bytes);
        let file = Arc::clone(sources[first.source].file());
        items.push(ReadItem { file, offset: first.offset - first.head() as u64, target });
        kept.push((*conversions, rest));
    }
    let started = Instant::now();
    Ok(Wave { pending: engine.read_batch(items)?, reads: kept, started })
}
