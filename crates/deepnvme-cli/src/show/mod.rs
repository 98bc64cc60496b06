//! Draws results as lines of text, tables and pictures.

pub mod aio_block;
pub mod bench;
pub mod checkpoint;
pub mod heatmap;
pub(crate) mod pack;
pub mod picture;
pub mod plot;
pub mod report;
pub mod tune;

/// Returns the name of a GPU's memory in tables.
fn memory_text(index: u32) -> String {
    format!("memory of cuda:{index}")
}
