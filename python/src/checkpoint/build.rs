//! From a pickle's graph to Python objects.
//!
//! Containers and plain values are made here. Whatever the file would have called goes through `factory`, which knows what
//! may be: `tensor`, `storage`, `resolve` (a global by its name), `call`, `new` and `give_state`.

use std::collections::HashSet;

use deepnvme_format::pickle::{Graph, Make, Node, NodeId, Object};
use deepnvme_format::state::{State, storage};
use pyo3::exceptions::{PyRecursionError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyFrozenSet, PyInt, PyList, PySet, PyString, PyTuple};

/// How deep containers may lie in one another.
const DEPTH_MAX: usize = 500;

/// What may be called while bytes are on their way.
const PLAIN: [(&str, &str); 10] = [
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "Size"),
    ("torch", "device"),
    ("_codecs", "encode"),
    ("builtins", "set"),
    ("__builtin__", "set"),
    ("builtins", "complex"),
];

/// Whether none of the objects looks at bytes when it is made.
pub(super) fn is_plain(graph: &Graph) -> bool {
    graph.nodes().iter().all(|node| match node {
        Node::Object(object) => graph.global(object.callable).is_some_and(|global| PLAIN.contains(&global)),
        _ => true,
    })
}

/// Makes the root object.
pub(super) fn build<'py>(
    py: Python<'py>,
    graph: &Graph,
    state: &State,
    factory: &Bound<'py, PyAny>,
    storages: &Bound<'py, PyList>,
    wanted: Option<&[String]>,
) -> PyResult<Bound<'py, PyAny>> {
    let keys = state.storages.iter().enumerate().map(|(index, storage)| (storage.key.as_str(), index));
    let mut builder = Builder {
        py,
        graph,
        factory,
        storages,
        by_key: keys.collect(),
        made: vec![None; graph.len()],
        choice: wanted.map(|wanted| Choice::new(state, wanted)),
        depth: 0,
    };
    builder.make(graph.root(), &Name::Root)
}

/// The way to an object; a text is made of it only when somebody asks.
enum Name<'a> {
    Root,
    Below(&'a Name<'a>, &'a str),
}

impl Name<'_> {
    fn text(&self) -> String {
        match self {
            Self::Root => String::new(),
            Self::Below(Self::Root, part) => (*part).to_owned(),
            Self::Below(above, part) => format!("{}.{part}", above.text()),
        }
    }
}

/// Which tensors are wanted: what has tensors, but none of those, is left out.
struct Choice {
    /// Names of tensors, and of all that they are in.
    with_tensors: HashSet<String>,
    with_wanted: HashSet<String>,
}

impl Choice {
    fn new(state: &State, wanted: &[String]) -> Self {
        let mut choice = Self { with_tensors: HashSet::new(), with_wanted: HashSet::new() };
        for tensor in &state.tensors {
            insert_with_parents(&mut choice.with_tensors, &tensor.name);
        }
        for name in wanted {
            insert_with_parents(&mut choice.with_wanted, name);
        }
        choice
    }

    fn leaves_out(&self, name: &str) -> bool {
        self.with_tensors.contains(name) && !self.with_wanted.contains(name)
    }
}

fn insert_with_parents(names: &mut HashSet<String>, name: &str) {
    let mut rest = name;
    while names.insert(rest.to_owned()) {
        let Some((parent, _)) = rest.rsplit_once('.') else { return };
        rest = parent;
    }
}

struct Builder<'a, 'py> {
    py: Python<'py>,
    graph: &'a Graph,
    factory: &'a Bound<'py, PyAny>,
    storages: &'a Bound<'py, PyList>,
    by_key: std::collections::HashMap<&'a str, usize>,
    made: Vec<Option<Bound<'py, PyAny>>>,
    choice: Option<Choice>,
    depth: usize,
}

impl<'py> Builder<'_, 'py> {
    fn make(&mut self, id: NodeId, name: &Name<'_>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(made) = &self.made[id.index()] {
            return Ok(made.clone());
        }
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(PyRecursionError::new_err(format!(
                "the file's objects lie more than {DEPTH_MAX} deep in one another"
            )));
        }
        let made = self.make_new(id, name)?;
        self.depth -= 1;
        self.made[id.index()] = Some(made.clone());
        Ok(made)
    }

    fn make_new(&mut self, id: NodeId, name: &Name<'_>) -> PyResult<Bound<'py, PyAny>> {
        let (py, graph) = (self.py, self.graph);
        Ok(match graph.node(id) {
            Node::None => py.None().into_bound(py),
            Node::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Node::Int(value) => value.into_pyobject(py)?.into_any(),
            Node::LongInt(bytes) => {
                let keywords = PyDict::new(py);
                keywords.set_item("signed", true)?;
                let class = py.get_type::<PyInt>();
                class.call_method("from_bytes", (PyBytes::new(py, bytes), "little"), Some(&keywords))?
            }
            Node::Float(value) => value.into_pyobject(py)?.into_any(),
            // Keys of state dicts are looked up again and again.
            Node::Str(text) => PyString::intern(py, text).into_any(),
            Node::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Node::ByteArray(bytes) => PyByteArray::new(py, bytes).into_any(),
            Node::Tuple(elements) => PyTuple::new(py, self.elements(elements, name)?)?.into_any(),
            Node::FrozenSet(elements) => PyFrozenSet::new(py, self.elements(elements, name)?)?.into_any(),
            Node::List(elements) => {
                let list = PyList::empty(py);
                // Before its elements: one of them may be the list itself.
                self.made[id.index()] = Some(list.clone().into_any());
                for element in self.elements(elements, name)? {
                    list.append(element)?;
                }
                list.into_any()
            }
            Node::Set(elements) => {
                let set = PySet::empty(py)?;
                self.made[id.index()] = Some(set.clone().into_any());
                for element in self.elements(elements, name)? {
                    set.add(element)?;
                }
                set.into_any()
            }
            Node::Dict(items) => {
                let dict = PyDict::new(py);
                self.made[id.index()] = Some(dict.clone().into_any());
                self.items(items, name, &mut |key, value| dict.set_item(key, value))?;
                dict.into_any()
            }
            Node::Global(..) => {
                self.factory.call_method1(intern!(py, "resolve"), graph.global(id).unwrap_or_default())?
            }
            Node::Persistent(key) => self.storage(*key, intern!(py, "storage"))?,
            Node::Object(object) => return self.object(id, object, name),
        })
    }

    fn elements(&mut self, elements: &[NodeId], name: &Name<'_>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let made = elements.iter().enumerate().map(|(index, element)| {
            let part = index.to_string();
            let name = Name::Below(name, &part);
            if self.leaves_out(&name) { Ok(self.py.None().into_bound(self.py)) } else { self.make(*element, &name) }
        });
        made.collect()
    }

    fn items(
        &mut self,
        items: &[(NodeId, NodeId)],
        name: &Name<'_>,
        set: &mut dyn FnMut(Bound<'py, PyAny>, Bound<'py, PyAny>) -> PyResult<()>,
    ) -> PyResult<()> {
        for (key, value) in items {
            let part = match self.graph.node(*key) {
                Node::Str(text) => text.to_string(),
                Node::Int(number) => number.to_string(),
                Node::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
                _ => "<key>".to_owned(),
            };
            let name = Name::Below(name, &part);
            if !self.leaves_out(&name) {
                set(self.make(*key, &name)?, self.make(*value, &name)?)?;
            }
        }
        Ok(())
    }

    fn leaves_out(&self, name: &Name<'_>) -> bool {
        self.choice.as_ref().is_some_and(|choice| choice.leaves_out(&name.text()))
    }

    fn object(&mut self, id: NodeId, object: &Object, name: &Name<'_>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let is_torch = |module: &str| module == "torch._utils";
        let global = self.graph.global(object.callable);
        if let Some((module, "_rebuild_tensor_v2")) = global
            && is_torch(module)
            && let Some(tensor) = self.tensor(object)?
        {
            self.made[id.index()] = Some(tensor.clone());
            return self.finish(tensor, object, name);
        }
        let callable = self.make(object.callable, name)?;
        // A parameter has the name of its tensor; the rest of its arguments has no names.
        let is_parameter =
            global.is_some_and(|(module, function)| is_torch(module) && function.starts_with("_rebuild_parameter"));
        let arguments = match self.graph.tuple(object.arguments) {
            Some(elements) if is_parameter => {
                let made = elements.iter().map(|element| self.make(*element, name)).collect::<PyResult<Vec<_>>>()?;
                PyTuple::new(py, made)?.into_any()
            }
            _ => self.make(object.arguments, name)?,
        };
        let made = match object.make {
            Make::Call => self.factory.call_method1(intern!(py, "call"), (callable, arguments))?,
            Make::NewObject => {
                let keywords = object.keywords.map(|keywords| self.make(keywords, name)).transpose()?;
                self.factory.call_method1(intern!(py, "new"), (callable, arguments, keywords))?
            }
        };
        self.made[id.index()] = Some(made.clone());
        self.finish(made, object, name)
    }

    /// Items, elements and states that an object is given after it was made.
    fn finish(&mut self, made: Bound<'py, PyAny>, object: &Object, name: &Name<'_>) -> PyResult<Bound<'py, PyAny>> {
        let refuse = |what: &str| {
            let class = made.get_type();
            Err(PyValueError::new_err(format!(
                "the file {what} an object of {class}, which has none; it is damaged or hostile"
            )))
        };
        if !object.items.is_empty() {
            if !made.is_instance_of::<PyDict>() {
                return refuse("sets items of");
            }
            self.items(&object.items, name, &mut |key, value| made.set_item(key, value))?;
        }
        if !object.elements.is_empty() {
            let method = if made.is_instance_of::<PyList>() {
                intern!(self.py, "append")
            } else if made.is_instance_of::<PySet>() {
                intern!(self.py, "add")
            } else {
                return refuse("adds elements to");
            };
            for element in self.elements(&object.elements, name)? {
                made.call_method1(method, (element,))?;
            }
        }
        for state in &object.states {
            let state = self.make(*state, name)?;
            self.factory.call_method1(intern!(self.py, "give_state"), (&made, state))?;
        }
        Ok(made)
    }

    /// The commonest object by far, by the shortest way: an ordinary tensor of a typed storage.
    fn tensor(&mut self, object: &Object) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, graph) = (self.py, self.graph);
        let Some(&[persistent, offset, shape, strides, requires_grad, ..]) = graph.tuple(object.arguments) else {
            return Ok(None);
        };
        let Some(arguments) = graph.tuple(object.arguments).filter(|arguments| arguments.len() == 6) else {
            return Ok(None);
        };
        let has_hooks = !matches!(graph.node(arguments[5]), Node::None)
            && !matches!(graph.node(arguments[5]), Node::Object(hooks) if hooks.items.is_empty() && hooks.states.is_empty());
        let (Node::Persistent(key), Node::Bool(requires_grad)) = (graph.node(persistent), graph.node(requires_grad))
        else {
            return Ok(None);
        };
        let (Some(offset), Some(shape), Some(strides)) =
            (graph.unsigned(offset), graph.dimensions(shape), graph.dimensions(strides))
        else {
            return Ok(None);
        };
        if has_hooks {
            return Ok(None);
        }
        let (storage, dtype) = self.untyped(*key)?;
        let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
        let arguments = (storage, dtype, offset, shape, strides, *requires_grad);
        self.factory.call_method1(intern!(py, "tensor"), arguments).map(Some)
    }

    fn storage(&mut self, key: NodeId, method: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
        let (storage, dtype) = self.untyped(key)?;
        self.factory.call_method1(method, (storage, dtype))
    }

    /// The storage of a persistent id, and the name of its element type.
    fn untyped(&self, key: NodeId) -> PyResult<(Bound<'py, PyAny>, &'static str)> {
        let wrong = |error: deepnvme_format::Error| PyValueError::new_err(error.to_string());
        let described = storage(self.graph, key).map_err(wrong)?;
        let index = self.by_key.get(described.key.as_str()).copied();
        let index = index.ok_or_else(|| PyValueError::new_err(format!("there is no storage {:?}", described.key)))?;
        Ok((self.storages.get_item(index)?, described.dtype.map_or("uint8", deepnvme_format::Dtype::torch_name)))
    }
}
