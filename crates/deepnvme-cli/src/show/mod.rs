//! Results as people read them: lines of text, tables and pictures.

pub mod aio_block;
pub mod bench;
pub mod checkpoint;
pub mod heatmap;
pub mod plot;
pub mod report;
pub mod tune;

/// As tables call its memory.
fn memory_text(index: u32) -> String {
    format!("memory of cuda:{index}")
}
