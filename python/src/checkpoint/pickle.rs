//! Pickle ordinary states on a fast path.
//!
//! Python's pickler asks the package about every object. For ten thousand tensors that takes longer than writing them.
//! State dicts contain few kinds of objects, which are pickled here: dicts (also ordered ones), lists, tuples, strings,
//! numbers, `None`, tensors and parameters. If a state contains anything else, Python's own pickler handles all of it
//! (`deepnvme._checkpoint.pickler`) and gives the same archive.

use std::collections::HashMap;

use deepnvme_format::pickle::{PICKLE_BYTES_MAX, PickleWriter, TensorView};
use deepnvme_format::state::{NAME_BYTES_MAX, PickledState};
use deepnvme_format::{DIMS_MAX, Dtype, Signs};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

use crate::error;
use crate::once::{GilOnce, intern};

/// Maximum nesting depth. Python's own pickler decides about deeper containers.
const DEPTH_MAX: usize = 200;
/// Maximum length of a number in a name.
const SHORT_NAME_BYTES: usize = 20;

/// A pickle and its storages, in key order.
type Pickled<'py> = (Vec<u8>, Vec<Bound<'py, PyAny>>);

/// Pickle a state. Returns the pickle and its storages. ``None`` leaves the state to Python's pickler, which pickles or
/// refuses it.
#[pyfunction]
pub(crate) fn _pickle_plain<'py>(py: Python<'py>, state: &Bound<'py, PyAny>) -> PyResult<Option<Pickled<'py>>> {
    let Some(torch) = Torch::get(py)? else { return Ok(None) };
    let mut pickler = Pickler {
        py,
        torch,
        out: PickleWriter::default(),
        memo: HashMap::new(),
        storages: Vec::new(),
        keys: HashMap::new(),
        name_bytes: 0,
    };
    if !pickler.save(state, 0)? {
        return Ok(None);
    }
    let pickle = pickler.out.finish();
    Ok((pickle.len() as u64 <= PICKLE_BYTES_MAX).then_some((pickle, pickler.storages)))
}

/// Raise if `load` would refuse a pickle. Called before anything is written.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
pub(crate) fn _check_pickle(py: Python<'_>, pickle: PyBackedBytes) -> PyResult<()> {
    let checked = py.detach(|| deepnvme_format::pickle::parse(&pickle).and_then(|graph| PickledState::of(&graph)));
    let refused = |error: deepnvme_format::Error| {
        let text = format!("the state cannot be saved so that it could be loaded: {error}");
        error::plain(py, "InvalidArgumentError", text)
    };
    checked.map(drop).map_err(refused)
}

/// The torch and Python objects by which values are recognised.
struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyAny>,
    strided: Py<PyAny>,
    ordered_dict: Py<PyAny>,
    /// Element types by the address of torch's dtype object. The entry keeps that object alive.
    dtypes: HashMap<usize, (Dtype, Py<PyAny>)>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<Option<&Self>> {
        static TORCH: GilOnce<Torch> = GilOnce::new();
        if let Some(torch) = TORCH.get(py) {
            return Ok(Some(torch));
        }
        let Some(module) = crate::imported::module(py, "torch")? else { return Ok(None) };
        let mut dtypes = HashMap::new();
        let is_plain = |dtype: &Dtype| dtype.storage_class().is_some() && !dtype.elements_share_bytes();
        for dtype in Dtype::ALL.into_iter().filter(is_plain) {
            if let Ok(object) = module.getattr(dtype.torch_name()) {
                dtypes.insert(address(&object), (dtype, object.unbind()));
            }
        }
        let torch = Self {
            tensor: module.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter: module.getattr("nn")?.getattr("Parameter")?.unbind(),
            strided: module.getattr("strided")?.unbind(),
            ordered_dict: py.import("collections")?.getattr("OrderedDict")?.unbind(),
            dtypes,
        };
        Ok(Some(TORCH.get_or_init(py, || torch)))
    }
}

fn address(object: &Bound<'_, PyAny>) -> usize {
    object.as_ptr() as usize
}

struct Pickler<'a, 'py> {
    py: Python<'py>,
    torch: &'a Torch,
    out: PickleWriter,
    /// Pickled objects by address. Each is kept alive: another thread may remove one from its container, and a new
    /// object at its address would be mistaken for it.
    memo: HashMap<usize, (u32, Bound<'py, PyAny>)>,
    storages: Vec<Bound<'py, PyAny>>,
    /// Key and archived element type of each storage, by address and size. `storages` keeps them alive so that their
    /// memory is not reused meanwhile.
    keys: HashMap<(usize, u64), (usize, Dtype)>,
    /// Upper bound of the current tensor name's length. Names are limited.
    name_bytes: usize,
}

/// Whether an object could be pickled.
type IsPickled = PyResult<bool>;

impl<'py> Pickler<'_, 'py> {
    fn save(&mut self, object: &Bound<'py, PyAny>, depth: usize) -> IsPickled {
        if object.is_none() {
            self.out.raw(b"N");
        } else if let Ok(value) = object.cast_exact::<PyBool>() {
            self.out.flag(value.is_true());
        } else if object.cast_exact::<PyInt>().is_ok() {
            let Ok(value) = object.extract::<i64>() else { return Ok(false) };
            self.out.int(value);
        } else if let Ok(value) = object.cast_exact::<PyFloat>() {
            self.out.float(value.value());
        } else if let Ok(text) = object.cast_exact::<PyString>() {
            return self.text_object(text);
        } else if let Some((index, _)) = self.memo.get(&address(object)) {
            self.out.get(*index);
        } else if depth > DEPTH_MAX {
            return Ok(false);
        } else if let Ok(dict) = object.cast_exact::<PyDict>() {
            self.out.raw(b"}");
            self.put(object);
            return self.items(dict, depth);
        } else if let Ok(list) = object.cast_exact::<PyList>() {
            self.out.raw(b"]");
            self.put(object);
            return self.list(list, depth);
        } else if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            return self.tuple(tuple, depth);
        } else {
            let kind = object.get_type();
            if kind.is(&self.torch.tensor) {
                return self.tensor(object);
            } else if kind.is(&self.torch.parameter) {
                return self.parameter(object);
            } else if kind.is(&self.torch.ordered_dict) {
                return self.ordered_dict(object, depth);
            }
            return Ok(false);
        }
        Ok(true)
    }

    fn text_object(&mut self, text: &Bound<'py, PyString>) -> IsPickled {
        if let Some((index, _)) = self.memo.get(&address(text)) {
            self.out.get(*index);
            return Ok(true);
        }
        // Lone surrogates, and strings too long for the instruction's length field.
        let Ok(content) = text.to_cow() else { return Ok(false) };
        if u32::try_from(content.len()).is_err() {
            return Ok(false);
        }
        self.out.text(&content);
        self.put(text.as_any());
        Ok(true)
    }

    fn items(&mut self, dict: &Bound<'py, PyDict>, depth: usize) -> IsPickled {
        if dict.is_empty() {
            return Ok(true);
        }
        self.out.raw(b"(");
        // Iterate over a list of the items: another thread may change the dict meanwhile.
        for pair in dict.items().iter() {
            let (key, value) = pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
            if !self.item(&key, &value, depth)? {
                return Ok(false);
            }
        }
        self.out.raw(b"u");
        Ok(true)
    }

    fn item(&mut self, key: &Bound<'py, PyAny>, value: &Bound<'py, PyAny>, depth: usize) -> IsPickled {
        if !self.save(key, depth + 1)? {
            return Ok(false);
        }
        let own = match key.cast_exact::<PyString>() {
            Ok(text) => text.to_cow().map_or(0, |text| text.len()),
            Err(_) => SHORT_NAME_BYTES,
        };
        self.name_bytes += own + 1;
        let is_saved = self.save(value, depth + 1)?;
        self.name_bytes -= own + 1;
        Ok(is_saved)
    }

    /// Pickles an element of a list or a tuple.
    fn element(&mut self, element: &Bound<'py, PyAny>, depth: usize) -> IsPickled {
        self.name_bytes += SHORT_NAME_BYTES;
        let is_saved = self.save(element, depth + 1)?;
        self.name_bytes -= SHORT_NAME_BYTES;
        Ok(is_saved)
    }

    fn list(&mut self, list: &Bound<'py, PyList>, depth: usize) -> IsPickled {
        if list.is_empty() {
            return Ok(true);
        }
        self.out.raw(b"(");
        for element in list.iter() {
            if !self.element(&element, depth)? {
                return Ok(false);
            }
        }
        self.out.raw(b"e");
        Ok(true)
    }

    fn tuple(&mut self, tuple: &Bound<'py, PyTuple>, depth: usize) -> IsPickled {
        if tuple.is_empty() {
            self.out.raw(b")");
            return Ok(true);
        }
        self.out.raw(b"(");
        for element in tuple.iter() {
            if !self.element(&element, depth)? {
                return Ok(false);
            }
        }
        // A tuple that contains itself through a list: rare enough for Python.
        if self.memo.contains_key(&address(tuple.as_any())) {
            return Ok(false);
        }
        self.out.raw(b"t");
        self.put(tuple.as_any());
        Ok(true)
    }

    fn ordered_dict(&mut self, object: &Bound<'py, PyAny>, depth: usize) -> IsPickled {
        self.out.ordered_dict();
        self.put(object);
        // Not the order of the underlying dict, which `move_to_end` leaves alone.
        let items = object.call_method0(intern!(self.py, "items"))?;
        let mut is_open = false;
        for pair in items.try_iter()? {
            let (key, value) = pair?.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
            if !std::mem::replace(&mut is_open, true) {
                self.out.raw(b"(");
            }
            if !self.item(&key, &value, depth)? {
                return Ok(false);
            }
        }
        if is_open {
            self.out.raw(b"u");
        }
        // Modules keep their versions in an attribute of their state dict.
        let attributes = object.getattr(intern!(self.py, "__dict__"))?;
        if attributes.is_truthy()? {
            let copy = attributes.call_method0(intern!(self.py, "copy"))?;
            if !self.save(&copy, depth + 1)? {
                return Ok(false);
            }
            self.out.raw(b"b");
        }
        Ok(true)
    }

    fn parameter(&mut self, parameter: &Bound<'py, PyAny>) -> IsPickled {
        let py = self.py;
        if parameter.getattr(intern!(py, "__dict__"))?.is_truthy()? || has_hooks(parameter)? {
            return Ok(false);
        }
        let data = parameter.getattr(intern!(py, "data"))?;
        self.out.global("ctorch._utils\n_rebuild_parameter\n");
        self.out.raw(b"(");
        if !self.tensor(&data)? {
            return Ok(false);
        }
        let requires_grad = parameter.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
        self.out.flag(requires_grad);
        self.out.ordered_dict();
        self.out.raw(b"tR");
        self.put(parameter);
        Ok(true)
    }

    fn tensor(&mut self, tensor: &Bound<'py, PyAny>) -> IsPickled {
        let py = self.py;
        let truth = |name: &Bound<'py, PyString>| tensor.getattr(name)?.is_truthy();
        let call = |name: &Bound<'py, PyString>| tensor.call_method0(name)?.is_truthy();
        let dtype = self.torch.dtypes.get(&address(&tensor.getattr(intern!(py, "dtype"))?));
        let Some(&(dtype, _)) = dtype else { return Ok(false) };
        let is_ordinary = truth(intern!(py, "is_cpu"))?
            && tensor.getattr(intern!(py, "layout"))?.is(&self.torch.strided)
            && !truth(intern!(py, "is_quantized"))?
            && !truth(intern!(py, "is_nested"))?
            && !call(intern!(py, "is_conj"))?
            && !call(intern!(py, "is_neg"))?
            && !call(intern!(py, "_is_zerotensor"))?
            && !truth(intern!(py, "__dict__"))?
            && !has_hooks(tensor)?;
        let dims: usize = tensor.call_method0(intern!(py, "dim"))?.extract()?;
        if !is_ordinary || dims > DIMS_MAX || self.name_bytes > NAME_BYTES_MAX {
            return Ok(false);
        }
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let nbytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let data_ptr: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let offset: u64 = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let shape: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<u64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        // The storage was resized. Python's pickler names the tensor in its error.
        if end_element(offset, &shape, &strides).saturating_mul(dtype.bytes()) > nbytes {
            return Ok(false);
        }
        let next = self.storages.len();
        // Empty storages have no address to identify them.
        let (key, known) =
            if nbytes == 0 { (next, dtype) } else { *self.keys.entry((data_ptr, nbytes)).or_insert((next, dtype)) };
        if known != dtype {
            return Ok(false);
        }
        if key == next {
            self.storages.push(storage);
        }
        self.out.tensor(&TensorView {
            key,
            dtype,
            storage_elements: nbytes / dtype.bytes(),
            offset,
            shape: &shape,
            strides: &strides,
            requires_grad: truth(intern!(py, "requires_grad"))?,
            signs: Signs::default(),
        });
        self.put(tensor);
        Ok(true)
    }

    fn put(&mut self, object: &Bound<'py, PyAny>) {
        let index = self.out.put();
        self.memo.insert(address(object), (index, object.clone()));
    }
}

fn has_hooks(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "_backward_hooks"))?.is_truthy()
}

/// Returns the number of elements of a storage up to the last one of a tensor; 0 if it has none.
fn end_element(offset: u64, shape: &[u64], strides: &[u64]) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    let steps = shape.iter().zip(strides).map(|(extent, stride)| (extent - 1).saturating_mul(*stride));
    steps.fold(offset.saturating_add(1), u64::saturating_add)
}
