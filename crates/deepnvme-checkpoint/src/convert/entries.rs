//! The tensors to convert, from all files of the source.

use std::collections::HashSet;
use std::sync::Arc;

use deepnvme_format::state::{NESTED_TENSOR, SPARSE_TENSOR, non_tensors};
use deepnvme_format::{Dtype, Signs};
use deepnvme_io::{Error as IoError, ErrorKind};

use crate::error::Result;
use crate::read::{Contents, Reader};

/// A tensor of the source: a view of one of its extents.
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// In elements.
    pub(super) strides: Vec<u64>,
    /// In elements.
    pub(super) offset: u64,
    pub(super) reader: usize,
    pub(super) extent: usize,
    /// The sign bits that are inverted relative to the extent.
    pub(super) signs: Signs,
}

impl TensorEntry {
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    /// Returns whether its elements are contiguous and in order.
    pub(super) fn is_contiguous(&self) -> bool {
        let expected = contiguous(&self.shape);
        let mut dims = self.shape.iter().zip(&self.strides).zip(&expected);
        self.bytes() == 0 || dims.all(|((size, stride), expected)| *size == 1 || stride == expected)
    }
}

/// Returns the strides of contiguous elements.
pub(super) fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        // For an empty tensor, as torch does: count an empty dimension as one element.
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// Collects the tensors, in the order of the files and their contents. If an index lists names for a file, only those.
/// A tensor stored several times in an archive appears under each name.
pub(super) fn of(readers: &[Arc<Reader>], listed: &[Option<Vec<String>>]) -> Vec<TensorEntry> {
    let mut entries = Vec::new();
    for (index, (reader, names)) in readers.iter().zip(listed).enumerate() {
        let names: Option<HashSet<&str>> = names.as_ref().map(|names| names.iter().map(String::as_str).collect());
        let is_listed = |entry: &TensorEntry| names.as_ref().is_none_or(|names| names.contains(entry.name.as_str()));
        entries.extend(in_file(index, reader).into_iter().filter(is_listed));
    }
    entries
}

fn in_file(reader: usize, file: &Reader) -> Vec<TensorEntry> {
    match file.contents() {
        Contents::Archive { state, .. } => {
            let entry = |tensor: &deepnvme_format::state::Tensor| TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                strides: tensor.strides.clone(),
                offset: tensor.offset,
                reader,
                extent: tensor.storage,
                signs: tensor.signs,
            };
            state.tensors.iter().map(entry).collect()
        }
        Contents::Safetensors { header } => {
            let entry = |(extent, tensor): (usize, &deepnvme_format::safetensors::Tensor)| TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                strides: contiguous(&tensor.shape),
                offset: 0,
                reader,
                extent,
                signs: Signs::default(),
            };
            header.tensors.iter().enumerate().map(entry).collect()
        }
    }
}

/// Refuses tensors that the new file could not name.
///
/// # Errors
/// `Unsupported`, with the path.
pub(super) fn refuse_unnamed(readers: &[Arc<Reader>]) -> Result<()> {
    for reader in readers {
        let Contents::Archive { state, .. } = reader.contents() else { continue };
        if let Some(tensor) = state.tensors.iter().find(|tensor| !tensor.is_named) {
            let name = &tensor.name;
            let detail =
                format!("the tensor {name:?} has a key that is neither text nor a whole number, so it has no name");
            return Err(IoError::new(ErrorKind::Unsupported, "convert", detail).at_path(reader.path()).into());
        }
    }
    Ok(())
}

/// Returns the names and kinds of all non-tensors.
///
/// # Errors
/// `Unsupported`, with the path, for a tensor of several tensors: as separate ones, they would no longer mean it.
pub(super) fn others(readers: &[Arc<Reader>]) -> Result<Vec<(String, &'static str)>> {
    let mut all = Vec::new();
    for reader in readers {
        let Contents::Archive { graph, .. } = reader.contents() else { continue };
        let others = non_tensors(graph);
        if let Some((name, kind)) = others.iter().find(|(_, kind)| [SPARSE_TENSOR, NESTED_TENSOR].contains(kind)) {
            let detail = format!("{name:?} is a {kind}, which cannot be converted; store a dense tensor in its place");
            return Err(IoError::new(ErrorKind::Unsupported, "convert", detail).at_path(reader.path()).into());
        }
        all.extend(others);
    }
    Ok(all)
}
