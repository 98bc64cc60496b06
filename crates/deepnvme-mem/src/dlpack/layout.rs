//! Checks a DLPack tensor's shape, strides and addresses.

use std::io;
use std::slice;

use super::abi::{DLDataType, DLTensor};
use crate::strided::{DIMS_MAX, Strided};

pub(super) fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.into())
}

/// Returns the bytes of one element. With `padded`, sub-byte elements take a whole byte each.
pub(super) fn item_bytes(dtype: DLDataType, padded: bool) -> io::Result<usize> {
    match dtype.item_bytes() {
        _ if padded && dtype.bits < 8 && dtype.lanes == 1 && dtype.bits > 0 => Ok(1),
        Some(bytes) if !padded || dtype.bits >= 8 => Ok(bytes),
        _ => {
            let message = format!("elements of {dtype:?} do not fill whole bytes; view the tensor as bytes");
            Err(io::Error::new(io::ErrorKind::Unsupported, message))
        }
    }
}

/// Returns the checked shape and strides in bytes.
///
/// # Safety
/// The lists of the tensor are null, not aligned, or have `ndim` entries if that is 0 to 64.
pub(super) unsafe fn layout_of(tensor: &DLTensor, item_bytes: usize) -> io::Result<Strided> {
    let dims = usize::try_from(tensor.ndim).ok().filter(|dims| *dims <= DIMS_MAX);
    let dims = dims.ok_or_else(|| invalid(format!("a tensor has 0 to {DIMS_MAX} dimensions, not {}", tensor.ndim)))?;
    if dims == 0 {
        return Strided::contiguous(Vec::new(), item_bytes);
    }
    if tensor.shape.is_null() || !tensor.shape.is_aligned() || !tensor.strides.is_aligned() {
        return Err(invalid(format!("a tensor of {dims} dimensions has no valid list of counts or strides")));
    }
    // SAFETY: the list is aligned and not null, and has `ndim` entries, as the caller of `layout_of` ensures.
    let counts = unsafe { slice::from_raw_parts(tensor.shape, dims) };
    let shape = counts.iter().map(|count| usize::try_from(*count)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| invalid(format!("shape {counts:?} has a count out of range")))?;
    if tensor.strides.is_null() {
        return Strided::contiguous(shape, item_bytes);
    }
    // SAFETY: the list is aligned and not null, and has `ndim` entries, as the caller of `layout_of` ensures.
    let strides = unsafe { slice::from_raw_parts(tensor.strides, dims) };
    let in_bytes = |stride: &i64| isize::try_from(*stride).ok()?.checked_mul(isize::try_from(item_bytes).ok()?);
    let stride_bytes = strides.iter().map(in_bytes).collect::<Option<Vec<_>>>();
    let stride_bytes = stride_bytes.ok_or_else(|| invalid(format!("strides {strides:?} exceed any memory")))?;
    Strided::new(shape, stride_bytes, item_bytes)
}

/// Checks that there is memory if there are elements, and that every element lies above address zero and below the end
/// of the address space.
pub(super) fn check_addresses(data: usize, byte_offset: usize, layout: &Strided) -> io::Result<()> {
    if layout.total_bytes() == 0 {
        return Ok(());
    }
    if data == 0 {
        return Err(invalid("a tensor with elements has no memory (a null pointer)"));
    }
    let (below_bytes, above_bytes) = layout.bytes_around_first();
    let first = data.checked_add(byte_offset);
    let lowest = first.and_then(|first| first.checked_sub(below_bytes)).filter(|lowest| *lowest > 0);
    let end = first.and_then(|first| first.checked_add(above_bytes));
    if lowest.is_none() || end.is_none() {
        return Err(invalid(format!("a tensor at {data:#x} with offset {byte_offset} leaves the address space")));
    }
    Ok(())
}
