//! The bytes of torch tensors. torch is never imported here, since a tensor exists only after that.

use deepnvme_format::{Dtype, Signs};
use deepnvme_io::{current_gpu, wait_for_copies as wait_for_copies_of};
use deepnvme_mem::dlpack::DLDevice;
use deepnvme_mem::{Device, Strided};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};

use crate::error::InvalidArgumentError;
use crate::imported::module;
use crate::memory::{self, DeviceStream, KeepAlive, Layout, MemoryAccess, PlainClasses, PlainTensor};
use crate::once::{GilOnce, intern};

/// The torch objects by which tensors are recognised.
struct Torch {
    tensor: Py<PyType>,
    strided: Py<PyAny>,
    /// Available from torch 2.10 on.
    plain: Option<PlainClasses>,
}

/// Returns torch, if this process has imported it.
fn imported(py: Python<'_>) -> PyResult<Option<&Torch>> {
    static TORCH: GilOnce<Torch> = GilOnce::new();
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let Some(module) = module(py, "torch")? else { return Ok(None) };
    // An import in progress has not defined its classes yet.
    let (Ok(tensor), Ok(strided)) = (module.getattr("Tensor"), module.getattr("strided")) else { return Ok(None) };
    let Ok(parameter) = module.getattr("nn").and_then(|nn| nn.getattr("Parameter")) else { return Ok(None) };
    let tensor = tensor.cast_into::<PyType>()?;
    let (Ok(int8), Ok(uint8)) = (module.getattr("int8"), module.getattr("uint8")) else { return Ok(None) };
    let plain = PlainClasses::of(&tensor, parameter.cast::<PyType>()?, [int8, uint8]);
    let torch = Torch { tensor: tensor.unbind(), strided: strided.unbind(), plain };
    Ok(Some(TORCH.get_or_init(py, || torch)))
}

/// Tells autograd that the tensors among these objects were changed in place. A backward pass that needs their old
/// values then raises, as after torch's in-place operations.
pub(crate) fn mark_modified(objects: &[Bound<'_, PyAny>]) -> PyResult<()> {
    let Some(py) = objects.first().map(Bound::py) else { return Ok(()) };
    let Some(torch) = imported(py)? else { return Ok(()) };
    let class = torch.tensor.bind(py);
    let mut tensors = Vec::with_capacity(objects.len());
    for object in objects {
        if object.is_instance(class)? {
            tensors.push(object.clone());
        }
    }
    increment_versions(py, &tensors)
}

/// Tells autograd that these tensors were changed in place, without running Python code: no signal is handled meanwhile,
/// whose exception would be lost.
pub(crate) fn increment_versions(py: Python<'_>, tensors: &[Bound<'_, PyAny>]) -> PyResult<()> {
    let Some(module) = module(py, "torch._C")? else { return Ok(()) };
    let Ok(increment) = module.getattr(intern!(py, "_increment_version")) else { return Ok(()) };
    if tensors.is_empty() || increment.call1((PyList::new(py, tensors)?,)).is_ok() {
        return Ok(());
    }
    // Tensors made in inference mode have no version. Older releases of torch take one tensor at a time.
    for tensor in tensors {
        drop(increment.call1((tensor,)).or_else(|_| increment.call1(((tensor,),))));
    }
    Ok(())
}

/// Returns the C functions that describe tensors, and the two classes that they take: torch's own, without subclasses.
/// `None` before torch 2.10.
pub(crate) fn plain_classes(py: Python<'_>) -> PyResult<Option<&PlainClasses>> {
    Ok(imported(py)?.and_then(|torch| torch.plain.as_ref()))
}

/// Returns the layout of a tensor; `None` for anything else.
pub(crate) fn layout(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<Option<Layout>> {
    let py = object.py();
    let Some(torch) = imported(py)? else { return Ok(None) };
    let class = torch.tensor.bind(py);
    if let Some(layout) = describe_plain(object, torch)? {
        return Ok(Some(layout));
    }
    if !object.get_type().is(class) && !object.is_instance(class)? {
        return Ok(None);
    }
    check_kind(object, torch)?;
    let resolved = resolve(object, access)?;
    describe(&resolved).map(Some)
}

/// Returns the layout of an ordinary tensor from one C call instead of many attributes; `None` for all others, which
/// take the slow path. For ten thousand tensors, the slow path takes longer than their bytes.
fn describe_plain(object: &Bound<'_, PyAny>, torch: &Torch) -> PyResult<Option<Layout>> {
    if plain_of(object, torch)?.is_none() {
        return Ok(None);
    }
    let (storage, keep) = held_storage(object)?;
    // Read again: only the held storage is sure to stay.
    let Some(PlainTensor { addresses, dtype, device, .. }) = plain_of(object, torch)? else { return Ok(None) };
    let (address, bytes) = (addresses.start, addresses.len());
    check_inside(object, &storage, dtype.item_bytes().unwrap_or(1), bytes)?;
    let device_stream = match (device.device_type, &torch.plain) {
        (DLDevice::CPU, _) => DeviceStream::HOST,
        (_, Some(classes)) => match classes.device_stream_of(device, object.py()) {
            Some(device_stream) => device_stream,
            None => device_stream(object)?,
        },
        (_, None) => device_stream(object)?,
    };
    Ok(Some(Layout { device_stream, address, bytes, strided: None, keep }))
}

/// Describe an ordinary tensor: contiguous, real, in host memory or on a CUDA GPU, and of torch's own class. `None` for
/// anything else.
pub(crate) fn plain(object: &Bound<'_, PyAny>) -> PyResult<Option<PlainTensor>> {
    imported(object.py())?.map_or(Ok(None), |torch| plain_of(object, torch))
}

fn plain_of(object: &Bound<'_, PyAny>, torch: &Torch) -> PyResult<Option<PlainTensor>> {
    let described = torch.plain.as_ref().and_then(|classes| classes.describe_anywhere(object));
    let Some(described) = described.and_then(|found| found.plain()) else { return Ok(None) };
    Ok((!is_lazy_negative(object)?).then_some(described))
}

/// Returns whether a tensor's signs are inverted when it is read: the imaginary part of a lazy conjugate is a real
/// tensor with the wrong sign.
pub(crate) fn is_lazy_negative(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy()
}

/// Waits for torch's current stream, which may copy from or to pinned memory. Runs no Python code, so that no signal is
/// handled meanwhile. Nothing happens in a process that uses no GPU.
pub(crate) fn wait_for_copies(py: Python<'_>) {
    let Some(Device::Cuda { index }) = current_gpu() else { return };
    let device = DLDevice { device_type: DLDevice::CUDA, device_id: index.cast_signed() };
    let Ok(Some(torch)) = imported(py) else { return };
    if let Some(device_stream) = torch.plain.as_ref().and_then(|classes| classes.device_stream_of(device, py)) {
        return py.detach(|| wait_for_copies_of(device_stream.stream));
    }
    // Before torch 2.10.
    let raw = module(py, "torch._C").ok().flatten().and_then(|module| {
        let function = module.getattr(intern!(py, "_cuda_getCurrentRawStream")).ok()?;
        memory::raw_stream(&function.call1((index,)).ok()?)
    });
    if let Some(stream) = raw {
        py.detach(|| wait_for_copies_of(stream));
    }
}

/// Returns the devices of untyped storages, with torch's current streams there. `None` if one of them is anything else,
/// or outside of host memory and CUDA devices.
pub(crate) fn storage_devices(storages: &[Bound<'_, PyAny>]) -> PyResult<Option<Vec<DeviceStream>>> {
    let Some(py) = storages.first().map(Bound::py) else { return Ok(Some(Vec::new())) };
    let Some(module) = module(py, "torch")? else { return Ok(None) };
    let class = module.getattr(intern!(py, "UntypedStorage"))?;
    let mut device_streams = Vec::with_capacity(storages.len());
    for storage in storages {
        if !storage.is_instance(&class)? {
            return Ok(None);
        }
        let device = storage.getattr(intern!(py, "device"))?;
        let kind = device.getattr(intern!(py, "type"))?;
        device_streams.push(if kind.eq(intern!(py, "cpu"))? {
            DeviceStream::HOST
        } else if kind.eq(intern!(py, "cuda"))? && !is_rocm(py)? {
            stream_of_device(&device)?
        } else {
            return Ok(None);
        });
    }
    Ok(Some(device_streams))
}

/// Keeps a tensor's storage alive. The tensor alone does not: `tensor.data = other` and `set_()` free its storage.
fn held_storage<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, KeepAlive)> {
    let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?;
    let keep = KeepAlive::storage(&storage)?;
    Ok((storage, keep))
}

/// Refuses bytes that a held storage does not have: it was resized, and its tensors keep their shapes.
fn check_inside(
    tensor: &Bound<'_, PyAny>,
    storage: &Bound<'_, PyAny>,
    item_bytes: usize,
    bytes: usize,
) -> PyResult<()> {
    if bytes == 0 {
        return Ok(());
    }
    let py = storage.py();
    let before: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    let storage_bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    if before.saturating_mul(item_bytes).saturating_add(bytes) <= storage_bytes {
        return Ok(());
    }
    Err(InvalidArgumentError::new_err(format!(
        "this tensor's storage has {storage_bytes} bytes, which is less than its shape takes: it was resized; resize it \
         back with untyped_storage().resize_(), or pass another tensor"
    )))
}

fn is_true(tensor: &Bound<'_, PyAny>, name: &Bound<'_, pyo3::types::PyString>) -> PyResult<bool> {
    tensor.getattr(name)?.is_truthy()
}

/// Refuses tensors without one reachable block of memory, and suggests a remedy.
fn check_kind(tensor: &Bound<'_, PyAny>, torch: &Torch) -> PyResult<()> {
    let py = tensor.py();
    let refuse = |what: String, remedy: &str| Err(PyTypeError::new_err(format!("this tensor {what}; {remedy}")));
    if is_true(tensor, intern!(py, "is_nested"))? {
        return refuse("is nested".into(), "transfer each tensor of tensor.unbind()");
    }
    let layout = tensor.getattr(intern!(py, "layout"))?;
    if !layout.is(&torch.strided) {
        return refuse(
            format!("has the layout {layout}, which is not one block of memory"),
            "transfer tensor.to_dense(), or the tensors that it is made of (indices() and values())",
        );
    }
    if is_true(tensor, intern!(py, "is_quantized"))? {
        return refuse("is quantised".into(), "transfer tensor.int_repr(), and keep its scale and zero point yourself");
    }
    if is_true(tensor, intern!(py, "is_cpu"))? {
        return Ok(());
    }
    if is_true(tensor, intern!(py, "is_cuda"))? {
        if !is_rocm(py)? {
            return Ok(());
        }
        return refuse(
            "is on an AMD GPU, which deepnvme does not know yet".into(),
            "write tensor.cpu(), or read into a CPU tensor and copy it over with tensor.copy_()",
        );
    }
    if is_true(tensor, intern!(py, "is_meta"))? {
        return refuse("is on the meta device and has no bytes".into(), "make a real one with torch.empty_like");
    }
    let device = tensor.getattr(intern!(py, "device"))?;
    refuse(
        format!("is on {device}, and deepnvme moves host memory and that of CUDA devices"),
        "write tensor.cpu(), or read into a CPU tensor and copy it over with tensor.copy_()",
    )
}

/// Returns whether torch is built for AMD GPUs, which it also calls CUDA devices.
fn is_rocm(py: Python<'_>) -> PyResult<bool> {
    let Some(version) = module(py, "torch.version")? else { return Ok(false) };
    Ok(version.getattr(intern!(py, "hip")).is_ok_and(|hip| !hip.is_none()))
}

/// Returns a tensor's device and, on a GPU, torch's current stream of this thread.
fn device_stream(tensor: &Bound<'_, PyAny>) -> PyResult<DeviceStream> {
    let py = tensor.py();
    if !is_true(tensor, intern!(py, "is_cuda"))? {
        return Ok(DeviceStream::HOST);
    }
    stream_of_device(&tensor.getattr(intern!(py, "device"))?)
}

/// Returns a CUDA device, and torch's current stream of this thread there.
fn stream_of_device(device: &Bound<'_, PyAny>) -> PyResult<DeviceStream> {
    let py = device.py();
    let index: u32 = device.getattr(intern!(py, "index"))?.extract::<Option<u32>>()?.unwrap_or(0);
    let Some(cuda) = module(py, "torch.cuda")? else {
        return Err(PyTypeError::new_err(format!("the memory is on {device}, and torch.cuda has not been imported")));
    };
    let stream = cuda.call_method1(intern!(py, "current_stream"), (index,))?;
    Ok(DeviceStream { device: Device::Cuda { index }, stream: memory::stream(&stream)? })
}

/// Returns a tensor as it is stored, and the signs that torch inverts when it reads it. Other objects are returned as
/// they are.
pub(crate) fn stored<'py>(object: &Bound<'py, PyAny>, dtype: Dtype) -> PyResult<(Bound<'py, PyAny>, Signs)> {
    let py = object.py();
    let is_tensor = |torch: &Torch| object.is_instance(torch.tensor.bind(py)).unwrap_or(false);
    if !imported(py)?.is_some_and(is_tensor) {
        return Ok((object.clone(), Signs::default()));
    }
    let is_set = |name| object.call_method0(name).and_then(|answer| answer.is_truthy());
    let is_conj = dtype.is_complex() && is_set(intern!(py, "is_conj"))?;
    let signs = Signs { is_conj, is_neg: is_set(intern!(py, "is_neg"))? };
    if signs.are_plain() {
        return Ok((object.clone(), signs));
    }
    let mut stored = object.call_method0(intern!(py, "detach"))?;
    // A second conjugate or negative undoes the first. Neither makes a copy.
    if signs.is_conj {
        stored = stored.call_method0(intern!(py, "conj"))?;
    }
    if signs.is_neg {
        let module = py.import(intern!(py, "torch"))?;
        stored = module.call_method1(intern!(py, "_neg_view"), (stored,))?;
    }
    Ok((stored, signs))
}

/// Applies lazy conjugation and negation before a write. A read cannot undo them.
fn resolve<'py>(tensor: &Bound<'py, PyAny>, access: MemoryAccess) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let is_set = |name| tensor.call_method0(name).and_then(|answer| answer.is_truthy());
    let conjugated = is_set(intern!(py, "is_conj"))?;
    if !conjugated && !is_set(intern!(py, "is_neg"))? {
        return Ok(tensor.clone());
    }
    match access {
        MemoryAccess::Read => {
            tensor.call_method0(intern!(py, "resolve_conj"))?.call_method0(intern!(py, "resolve_neg"))
        }
        MemoryAccess::Write => {
            let (kind, remedy) = if conjugated { ("conjugate", "resolve_conj") } else { ("negative", "resolve_neg") };
            Err(InvalidArgumentError::new_err(format!(
                "this tensor is a lazy {kind} view of another, so that its bytes are not its values; read into \
                 tensor.{remedy}() or into the tensor that it is a view of"
            )))
        }
    }
}

fn describe(tensor: &Bound<'_, PyAny>) -> PyResult<Layout> {
    let py = tensor.py();
    if let Err(error) = tensor.call_method0(intern!(py, "data_ptr")) {
        return Err(no_memory(tensor, &error.to_string())?);
    }
    // Hold the storage before reading anything that a resize would change.
    let (storage, keep) = held_storage(tensor)?;
    let bytes: usize = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
    let address = match tensor.call_method0(intern!(py, "data_ptr")) {
        Ok(address) => address.extract::<usize>()?,
        Err(error) => return Err(no_memory(tensor, &error.to_string())?),
    };
    if address == 0 && bytes > 0 {
        return Err(no_memory(tensor, "its data pointer is null")?);
    }
    let contiguous = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
    let strided = if contiguous { None } else { Some(strides(tensor)?) };
    let item_bytes: usize = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
    check_inside(tensor, &storage, item_bytes, strided.as_ref().map_or(bytes, span_bytes))?;
    Ok(Layout { device_stream: device_stream(tensor)?, address, bytes, strided, keep })
}

/// Returns the bytes from the first to the last element.
fn span_bytes(strided: &Strided) -> usize {
    if strided.shape.contains(&0) {
        return 0;
    }
    let steps = strided.shape.iter().zip(&strided.stride_bytes);
    let last = steps.map(|(extent, stride)| (extent - 1).saturating_mul(stride.unsigned_abs()));
    last.fold(strided.item_bytes, usize::saturating_add)
}

fn strides(tensor: &Bound<'_, PyAny>) -> PyResult<Strided> {
    let py = tensor.py();
    let item_bytes: usize = tensor.call_method0(intern!(py, "element_size"))?.extract()?;
    let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
    let strides: Vec<isize> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
    let stride_bytes = strides.into_iter().map(|stride| stride.saturating_mul(item_bytes as isize)).collect();
    Ok(Strided { shape, stride_bytes, item_bytes })
}

/// Returns the error for tensors that own no bytes: wrappers of others (DTensor, fake and functional tensors, those
/// inside vmap).
fn no_memory(tensor: &Bound<'_, PyAny>, cause: &str) -> PyResult<PyErr> {
    let class = tensor.get_type();
    let name = class.name()?;
    Ok(InvalidArgumentError::new_err(format!(
        "this {name} has no memory of its own ({cause}); transfer the tensor that it wraps (of a DTensor, to_local())"
    )))
}
