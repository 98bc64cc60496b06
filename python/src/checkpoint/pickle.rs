//! Ordinary states as pickles, by the shortest way.
//!
//! Python's pickler asks the package about every object that it meets; of ten thousand tensors, that takes longer than
//! writing them. A state dict is made of few kinds of objects, and those are pickled here: dicts, lists, tuples, texts,
//! numbers, tensors and parameters. Anything else, anywhere in the state, and Python's own pickler does it all
//! (`deepnvme._checkpoint.pickler`), which gives the same archive.

use std::collections::HashMap;

use deepnvme_format::Dtype;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

/// How deep containers may lie in one another; Python's own pickler decides about deeper ones.
const DEPTH_MAX: usize = 200;

/// A pickle, and the storages that it refers to, in the order of their keys.
type Pickled<'py> = (Vec<u8>, Vec<Bound<'py, PyAny>>);

/// A pickle and its storages; ``None`` of what only Python can pickle.
#[pyfunction]
pub(crate) fn _pickle_plain<'py>(py: Python<'py>, state: &Bound<'py, PyAny>) -> PyResult<Option<Pickled<'py>>> {
    let Some(torch) = Torch::get(py)? else { return Ok(None) };
    let mut pickler = Pickler {
        py,
        torch,
        bytes: b"\x80\x02".to_vec(),
        memo: HashMap::new(),
        globals: HashMap::new(),
        memoized: 0,
        storages: Vec::new(),
        keys: HashMap::new(),
        held: Vec::new(),
    };
    if !pickler.save(state, 0)? {
        return Ok(None);
    }
    pickler.bytes.push(b'.');
    Ok(Some((pickler.bytes, pickler.storages)))
}

/// What of torch and Python is needed to recognise objects.
struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyAny>,
    strided: Py<PyAny>,
    ordered_dict: Py<PyAny>,
    /// Element types by the address of torch's object for them.
    dtypes: HashMap<usize, Dtype>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<Option<&Self>> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        if let Some(torch) = TORCH.get(py) {
            return Ok(Some(torch));
        }
        let Some(module) = crate::torch::module(py, "torch")? else { return Ok(None) };
        let mut dtypes = HashMap::new();
        for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.storage_class().is_some()) {
            if let Ok(object) = module.getattr(dtype.torch_name()) {
                dtypes.insert(address(&object), dtype);
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
    bytes: Vec<u8>,
    /// Objects that have been pickled, by their address.
    memo: HashMap<usize, u32>,
    globals: HashMap<&'static str, u32>,
    memoized: u32,
    storages: Vec<Bound<'py, PyAny>>,
    /// Storages by address and size: the key, and the element type that the archive has for it.
    keys: HashMap<(usize, u64), (usize, Dtype)>,
    /// What was made on the way: another object at the address of one that is gone would be taken for it.
    held: Vec<Bound<'py, PyAny>>,
}

/// Whether an object could be pickled.
type Done = PyResult<bool>;

impl<'py> Pickler<'_, 'py> {
    fn save(&mut self, object: &Bound<'py, PyAny>, depth: usize) -> Done {
        if object.is_none() {
            self.bytes.push(b'N');
        } else if let Ok(value) = object.cast_exact::<PyBool>() {
            self.bytes.push(if value.is_true() { 0x88 } else { 0x89 });
        } else if object.cast_exact::<PyInt>().is_ok() {
            let Ok(value) = object.extract::<i64>() else { return Ok(false) };
            self.int(value);
        } else if let Ok(value) = object.cast_exact::<PyFloat>() {
            self.bytes.push(b'G');
            self.bytes.extend(value.value().to_be_bytes());
        } else if let Ok(text) = object.cast_exact::<PyString>() {
            return self.text_object(text);
        } else if let Some(index) = self.memo.get(&address(object)) {
            let index = *index;
            self.get(index);
        } else if depth > DEPTH_MAX {
            return Ok(false);
        } else if let Ok(dict) = object.cast_exact::<PyDict>() {
            self.bytes.push(b'}');
            self.put(object);
            return self.items(dict, depth);
        } else if let Ok(list) = object.cast_exact::<PyList>() {
            self.bytes.push(b']');
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

    fn int(&mut self, value: i64) {
        if let Ok(small) = u8::try_from(value) {
            self.bytes.extend([b'K', small]);
        } else if let Ok(short) = u16::try_from(value) {
            self.bytes.push(b'M');
            self.bytes.extend(short.to_le_bytes());
        } else if let Ok(word) = i32::try_from(value) {
            self.bytes.push(b'J');
            self.bytes.extend(word.to_le_bytes());
        } else {
            self.bytes.extend([0x8a, 8]);
            self.bytes.extend(value.to_le_bytes());
        }
    }

    fn text(&mut self, text: &str) {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    fn text_object(&mut self, text: &Bound<'py, PyString>) -> Done {
        if let Some(index) = self.memo.get(&address(text)) {
            let index = *index;
            self.get(index);
            return Ok(true);
        }
        // Lone surrogates, and what is longer than the instruction's length.
        let Ok(content) = text.to_cow() else { return Ok(false) };
        if u32::try_from(content.len()).is_err() {
            return Ok(false);
        }
        self.text(&content);
        self.put(text.as_any());
        Ok(true)
    }

    fn items(&mut self, dict: &Bound<'py, PyDict>, depth: usize) -> Done {
        if dict.is_empty() {
            return Ok(true);
        }
        self.bytes.push(b'(');
        // A list of the items: another thread may change the dict meanwhile.
        for pair in dict.items().iter() {
            let (key, value) = pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
            if !self.save(&key, depth + 1)? || !self.save(&value, depth + 1)? {
                return Ok(false);
            }
        }
        self.bytes.push(b'u');
        Ok(true)
    }

    fn list(&mut self, list: &Bound<'py, PyList>, depth: usize) -> Done {
        if list.is_empty() {
            return Ok(true);
        }
        self.bytes.push(b'(');
        for element in list.iter() {
            if !self.save(&element, depth + 1)? {
                return Ok(false);
            }
        }
        self.bytes.push(b'e');
        Ok(true)
    }

    fn tuple(&mut self, tuple: &Bound<'py, PyTuple>, depth: usize) -> Done {
        if tuple.is_empty() {
            self.bytes.push(b')');
            return Ok(true);
        }
        self.bytes.push(b'(');
        for element in tuple.iter() {
            if !self.save(&element, depth + 1)? {
                return Ok(false);
            }
        }
        // A tuple that holds itself, by way of a list: rare enough for Python.
        if self.memo.contains_key(&address(tuple.as_any())) {
            return Ok(false);
        }
        self.bytes.push(b't');
        self.put(tuple.as_any());
        Ok(true)
    }

    fn ordered_dict(&mut self, object: &Bound<'py, PyAny>, depth: usize) -> Done {
        self.global("OrderedDict", "ccollections\nOrderedDict\n");
        self.bytes.extend(b")R");
        self.put(object);
        // Not the order of the dict underneath, which `move_to_end` leaves alone.
        let items = object.call_method0(intern!(self.py, "items"))?;
        let mut is_open = false;
        for pair in items.try_iter()? {
            let (key, value) = pair?.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
            if !std::mem::replace(&mut is_open, true) {
                self.bytes.push(b'(');
            }
            if !self.save(&key, depth + 1)? || !self.save(&value, depth + 1)? {
                return Ok(false);
            }
        }
        if is_open {
            self.bytes.push(b'u');
        }
        // Modules keep their versions in an attribute of their state dict.
        let attributes = object.getattr(intern!(self.py, "__dict__"))?;
        if attributes.is_truthy()? {
            let copy = attributes.call_method0(intern!(self.py, "copy"))?;
            if !self.save(&copy, depth + 1)? {
                return Ok(false);
            }
            self.held.push(copy);
            self.bytes.push(b'b');
        }
        Ok(true)
    }

    fn parameter(&mut self, parameter: &Bound<'py, PyAny>) -> Done {
        let py = self.py;
        if parameter.getattr(intern!(py, "__dict__"))?.is_truthy()? || has_hooks(parameter)? {
            return Ok(false);
        }
        let data = parameter.getattr(intern!(py, "data"))?;
        self.global("_rebuild_parameter", "ctorch._utils\n_rebuild_parameter\n");
        self.bytes.push(b'(');
        if !self.tensor(&data)? {
            return Ok(false);
        }
        self.held.push(data);
        let requires_grad = parameter.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
        self.flag(requires_grad);
        self.no_hooks();
        self.bytes.extend(b"tR");
        self.put(parameter);
        Ok(true)
    }

    fn tensor(&mut self, tensor: &Bound<'py, PyAny>) -> Done {
        let py = self.py;
        let truth = |name: &Bound<'py, PyString>| tensor.getattr(name)?.is_truthy();
        let answer = |name: &Bound<'py, PyString>| tensor.call_method0(name)?.is_truthy();
        let dtype = self.torch.dtypes.get(&address(&tensor.getattr(intern!(py, "dtype"))?)).copied();
        let Some((dtype, class)) = dtype.and_then(|dtype| Some((dtype, dtype.storage_class()?))) else {
            return Ok(false);
        };
        let is_ordinary = truth(intern!(py, "is_cpu"))?
            && tensor.getattr(intern!(py, "layout"))?.is(&self.torch.strided)
            && !truth(intern!(py, "is_quantized"))?
            && !truth(intern!(py, "is_nested"))?
            && !answer(intern!(py, "is_conj"))?
            && !answer(intern!(py, "is_neg"))?
            && !truth(intern!(py, "__dict__"))?
            && !has_hooks(tensor)?;
        if !is_ordinary {
            return Ok(false);
        }
        let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
        let nbytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        let place: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let next = self.storages.len();
        // Storages without bytes have no address to be known by.
        let (key, known) =
            if nbytes == 0 { (next, dtype) } else { *self.keys.entry((place, nbytes)).or_insert((next, dtype)) };
        if known != dtype {
            return Ok(false);
        }
        if key == next {
            self.storages.push(storage);
        }
        self.global("_rebuild_tensor_v2", "ctorch._utils\n_rebuild_tensor_v2\n");
        self.bytes.extend(b"((");
        self.text("storage");
        self.bytes.extend(format!("ctorch\n{class}\n").as_bytes());
        self.text(&key.to_string());
        self.text("cpu");
        self.int((nbytes / dtype.bytes()) as i64);
        self.bytes.extend(b"tQ");
        self.int(tensor.call_method0(intern!(py, "storage_offset"))?.extract()?);
        self.numbers(&tensor.getattr(intern!(py, "shape"))?)?;
        self.numbers(&tensor.call_method0(intern!(py, "stride"))?)?;
        self.flag(truth(intern!(py, "requires_grad"))?);
        self.no_hooks();
        self.bytes.extend(b"tR");
        self.put(tensor);
        Ok(true)
    }

    /// A tuple of integers.
    fn numbers(&mut self, numbers: &Bound<'py, PyAny>) -> PyResult<()> {
        let numbers = numbers.cast::<PyTuple>()?;
        self.bytes.push(b'(');
        for number in numbers.iter() {
            self.int(number.extract()?);
        }
        self.bytes.push(b't');
        Ok(())
    }

    fn flag(&mut self, value: bool) {
        self.bytes.push(if value { 0x88 } else { 0x89 });
    }

    /// An empty dict of hooks: each tensor has its own, or a hook of one would be one of all.
    fn no_hooks(&mut self) {
        self.global("OrderedDict", "ccollections\nOrderedDict\n");
        self.bytes.extend(b")R");
    }

    fn global(&mut self, name: &'static str, instruction: &'static str) {
        if let Some(index) = self.globals.get(name) {
            let index = *index;
            self.get(index);
            return;
        }
        self.bytes.extend(instruction.as_bytes());
        self.globals.insert(name, self.memoized);
        self.put_next();
    }

    fn put(&mut self, object: &Bound<'py, PyAny>) {
        self.memo.insert(address(object), self.memoized);
        self.put_next();
    }

    fn put_next(&mut self) {
        if let Ok(small) = u8::try_from(self.memoized) {
            self.bytes.extend([b'q', small]);
        } else {
            self.bytes.push(b'r');
            self.bytes.extend(self.memoized.to_le_bytes());
        }
        self.memoized += 1;
    }

    fn get(&mut self, index: u32) {
        if let Ok(small) = u8::try_from(index) {
            self.bytes.extend([b'h', small]);
        } else {
            self.bytes.push(b'j');
            self.bytes.extend(index.to_le_bytes());
        }
    }
}

fn has_hooks(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "_backward_hooks"))?.is_truthy()
}
