//! The tensors to convert, from all files of the source.

use std::collections::HashSet;
use std::sync::Arc;

use deepnvme_format::Signs;
use deepnvme_format::state::{
    NESTED_TENSOR, OBJECT, SPARSE_TENSOR, Tensor, View, contiguous_strides, non_tensors, tensor_of_tensors,
};
use deepnvme_io::{Error as IoError, ErrorKind};

use crate::error::Result;
use crate::read::{FileMetadata, Reader};

/// A tensor of the source.
pub(super) struct TensorEntry {
    /// The index of its file.
    pub(super) reader: usize,
    /// Its storage is an extent of that file.
    pub(super) tensor: Tensor,
}

impl TensorEntry {
    /// Returns whether its elements are contiguous and in order.
    pub(super) fn is_contiguous(&self) -> bool {
        let View { shape, strides, .. } = &self.tensor.view;
        let expected = contiguous_strides(shape);
        let mut dims = shape.iter().zip(strides).zip(&expected);
        self.tensor.bytes() == 0 || dims.all(|((size, stride), expected)| *size == 1 || stride == expected)
    }
}

/// Collects the tensors, in the order of the files and their contents. If an index lists names for a file, only those.
/// A tensor stored several times in an archive appears under each name.
pub(super) fn of(readers: &[Arc<Reader>], listed: &[Option<Vec<String>>]) -> Vec<TensorEntry> {
    let mut entries = Vec::new();
    for (index, (reader, names)) in readers.iter().zip(listed).enumerate() {
        let names: Option<HashSet<&str>> = names.as_ref().map(|names| names.iter().map(String::as_str).collect());
        let is_listed =
            |entry: &TensorEntry| names.as_ref().is_none_or(|names| names.contains(entry.tensor.name.as_str()));
        entries.extend(in_file(index, reader).into_iter().filter(is_listed));
    }
    entries
}

fn in_file(reader: usize, file: &Reader) -> Vec<TensorEntry> {
    match file.file_metadata() {
        FileMetadata::Archive { state, .. } => {
            state.tensors.iter().map(|tensor| TensorEntry { reader, tensor: tensor.clone() }).collect()
        }
        FileMetadata::Safetensors { header } => {
            let of_extent = |(storage, tensor): (usize, &deepnvme_format::safetensors::Tensor)| Tensor {
                name: tensor.name.clone(),
                is_named: true,
                dtype: tensor.dtype,
                view: View::contiguous(tensor.shape.clone()),
                storage,
                signs: Signs::default(),
            };
            let tensors = header.tensors.iter().enumerate().map(of_extent);
            tensors.map(|tensor| TensorEntry { reader, tensor }).collect()
        }
    }
}

/// Refuses tensors that the new file could not name.
///
/// # Errors
/// `Unsupported`, with the path.
pub(super) fn refuse_unnamed(readers: &[Arc<Reader>]) -> Result<()> {
    for reader in readers {
        let FileMetadata::Archive { state, .. } = reader.file_metadata() else { continue };
        if let Some(tensor) = state.tensors.iter().find(|tensor| !tensor.is_named) {
            let name = &tensor.name;
            let detail =
                format!("the tensor {name:?} has a key that is neither text nor a whole number, so it has no name");
            return Err(IoError::new(ErrorKind::Unsupported, "convert", detail).at_path(reader.path()).into());
        }
    }
    Ok(())
}

/// Returns the names and kinds of the non-tensors, as many of each file as [`non_tensors`] lists.
///
/// # Errors
/// `Unsupported`, with the path, for a sparse or nested tensor: its parts, as separate tensors, would lose its meaning.
pub(super) fn others(readers: &[Arc<Reader>]) -> Result<Vec<(String, &'static str)>> {
    let mut all = Vec::new();
    for reader in readers {
        let FileMetadata::Archive { graph, .. } = reader.file_metadata() else { continue };
        let others = non_tensors(graph);
        if let Some(kind) = tensor_of_tensors(graph) {
            let listed = others.iter().find(|(_, kind)| [SPARSE_TENSOR, NESTED_TENSOR].contains(kind));
            let place = listed.map_or_else(|| "the state has".into(), |(name, _)| format!("{name:?} is"));
            let detail = format!("{place} a {kind}, which cannot be converted; store a dense tensor in its place");
            return Err(IoError::new(ErrorKind::Unsupported, "convert", detail).at_path(reader.path()).into());
        }
        let is_of_module =
            |tensor: &Tensor| tensor.name.split('.').any(|part| part == "_parameters" || part == "_buffers");
        let has_object = others.iter().any(|(_, kind)| *kind == OBJECT);
        if let FileMetadata::Archive { state, .. } = reader.file_metadata()
            && has_object
            && state.tensors.iter().any(is_of_module)
        {
            let detail = "this is a pickled module, whose tensors have no names of a state dict; save its state_dict(), \
                          and convert that";
            return Err(IoError::new(ErrorKind::Unsupported, "convert", detail).at_path(reader.path()).into());
        }
        all.extend(others);
    }
    Ok(all)
}
