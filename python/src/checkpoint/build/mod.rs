//! Build Python objects from a pickle's graph.
//!
//! Containers and plain values are built here. The methods of `factory` make everything else, and refuse what is not
//! allowed: `tensor`, `storage`, `own_storage`, `resolve` (a global by its name), `call`, `new`, `give_state` and
//! `takes_parts`.

use std::borrow::Cow;
use std::collections::HashMap;

use deepnvme_format::pickle::{Graph, Make, Node, NodeId, Object};
use deepnvme_format::state::{DEPTH_MAX, PickledState, storage};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyFrozenSet, PyInt, PyList, PySet, PyString, PyTuple};

use callables::WITHOUT_TENSOR;
use hashing::TableKind;
use selection::{NameScope, Selection};

use crate::error;
use crate::once::intern;

mod callables;
mod hashing;
mod selection;

pub(super) use callables::is_plain;
pub(crate) use hashing::HashCosts;

/// Limit of builds that are started for one object. A tuple inside one of its own lists is started twice.
const ENTRIES_MAX: u8 = 16;
/// Objects between checks for Ctrl-C.
const OBJECTS_PER_CHECK: u32 = 1 << 12;
/// Maximum arguments of a parameter: tensor, flag, hooks, state.
const PARAMETER_ARGUMENTS_MAX: usize = 4;

/// Builds the root object.
pub(super) fn build<'py>(
    graph: &Graph,
    state: &PickledState,
    factory: &Bound<'py, PyAny>,
    storages: &Bound<'py, PyList>,
    wanted: Option<&[String]>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = factory.py();
    let costs = factory.getattr(intern!(py, "hash_costs"))?.cast_into::<HashCosts>()?;
    let keys = state.storages.iter().enumerate().map(|(index, storage)| (storage.key.as_str(), index));
    let mut builder = Builder {
        py,
        graph,
        factory,
        storages,
        by_key: keys.collect(),
        built: vec![None; graph.len()],
        entries: vec![0; graph.len()],
        selection: wanted.map(|wanted| Selection::new(graph, state, wanted)),
        costs: costs.get(),
        steps_since_check: 0,
        depth: 0,
        within: 0,
    };
    let root = builder.selection.as_ref().map_or_else(NameScope::default, Selection::root);
    builder.build(graph.root(), root)
}

struct Builder<'a, 'py> {
    py: Python<'py>,
    graph: &'a Graph,
    factory: &'a Bound<'py, PyAny>,
    storages: &'a Bound<'py, PyList>,
    by_key: HashMap<&'a str, usize>,
    built: Vec<Option<Bound<'py, PyAny>>>,
    /// Builds started for each node.
    entries: Vec<u8>,
    selection: Option<Selection<'a>>,
    costs: &'a HashCosts,
    steps_since_check: u32,
    depth: usize,
    /// Number of wanted objects around the current one. All parts of a wanted object are wanted.
    within: usize,
}

impl<'py> Builder<'_, 'py> {
    fn build(&mut self, id: NodeId, scope: NameScope) -> PyResult<Bound<'py, PyAny>> {
        if let Some(built) = &self.built[id.index()] {
            return Ok(built.clone());
        }
        self.check_signals()?;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.unsupported(&format!("lie more than {DEPTH_MAX} deep in one another")));
        }
        self.entries[id.index()] += 1;
        if self.entries[id.index()] > ENTRIES_MAX {
            return Err(self.unsupported("are made of themselves again and again"));
        }
        let built = self.build_new(id, scope)?;
        self.depth -= 1;
        // If a tuple and a list contain each other, the list already holds the tuple built on the way. Return that one.
        Ok(self.built[id.index()].get_or_insert(built).clone())
    }

    /// Lets Python check for Ctrl-C, and other threads run, every `OBJECTS_PER_CHECK` objects.
    fn check_signals(&mut self) -> PyResult<()> {
        self.steps_since_check = self.steps_since_check.wrapping_add(1);
        if !self.steps_since_check.is_multiple_of(OBJECTS_PER_CHECK) {
            return Ok(());
        }
        self.py.detach(|| ());
        self.py.check_signals()
    }

    fn unsupported(&self, what: &str) -> PyErr {
        error::plain(self.py, "UnsupportedError", format!("the file's objects {what}; it was made to be too much"))
    }

    fn build_new(&mut self, id: NodeId, scope: NameScope) -> PyResult<Bound<'py, PyAny>> {
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
            Node::Surrogates(bytes) => {
                PyBytes::new(py, bytes).call_method1(intern!(py, "decode"), ("utf-8", "surrogatepass"))?
            }
            Node::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Node::ByteArray(bytes) => PyByteArray::new(py, bytes).into_any(),
            Node::Tuple(elements) => PyTuple::new(py, self.elements(elements, scope)?)?.into_any(),
            Node::FrozenSet(elements) => {
                let elements = self.elements(elements, scope)?;
                self.costs.charge(elements.iter(), TableKind::Set)?;
                PyFrozenSet::new(py, elements)?.into_any()
            }
            Node::List(elements) => {
                let list = PyList::empty(py);
                // Register it before its elements: one of them may be the list itself.
                self.built[id.index()] = Some(list.clone().into_any());
                for element in self.elements(elements, scope)? {
                    list.append(element)?;
                }
                list.into_any()
            }
            Node::Set(elements) => {
                let set = PySet::empty(py)?;
                self.built[id.index()] = Some(set.clone().into_any());
                let elements = self.elements(elements, scope)?;
                self.costs.charge(elements.iter(), TableKind::Set)?;
                for element in elements {
                    set.add(element)?;
                }
                set.into_any()
            }
            Node::Dict(items) => {
                let dict = PyDict::new(py);
                self.built[id.index()] = Some(dict.clone().into_any());
                self.items(items, scope, &mut |key, value| dict.set_item(key, value))?;
                dict.into_any()
            }
            Node::Global(..) => {
                self.factory.call_method1(intern!(py, "resolve"), graph.global(id).unwrap_or_default())?
            }
            Node::Persistent(key) => self.storage(*key, intern!(py, "own_storage"))?,
            Node::Object(object) => return self.object(id, object, scope),
        })
    }

    fn elements(&mut self, elements: &[NodeId], scope: NameScope) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let built = elements.iter().enumerate().map(|(index, element)| {
            match self.child(scope, *element, || index.to_string().into()) {
                Some(scope) => self.build(*element, scope),
                None => Ok(self.py.None().into_bound(self.py)),
            }
        });
        built.collect()
    }

    fn items(
        &mut self,
        items: &[(NodeId, NodeId)],
        scope: NameScope,
        set: &mut dyn FnMut(Bound<'py, PyAny>, Bound<'py, PyAny>) -> PyResult<()>,
    ) -> PyResult<()> {
        let graph = self.graph;
        let (mut keys, mut values) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
        for (key, value) in items {
            if let Some(scope) = self.child(scope, *value, || graph.key_name(*key)) {
                keys.push(self.build(*key, scope)?);
                values.push(self.build(*value, scope)?);
            }
        }
        self.costs.charge(keys.iter(), TableKind::Dict)?;
        for (key, value) in keys.into_iter().zip(values) {
            self.check_signals()?;
            set(key, value)?;
        }
        Ok(())
    }

    /// Returns the scope of a part; `None` if the part is omitted.
    fn child<'n>(&self, scope: NameScope, id: NodeId, part: impl FnOnce() -> Cow<'n, str>) -> Option<NameScope> {
        let Some(selection) = &self.selection else { return Some(scope) };
        let node = self.graph.node(id);
        let may_hold_tensors =
            !matches!(node, Node::None | Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Str(_));
        if !may_hold_tensors {
            return Some(scope);
        }
        let scope = selection.child(scope, &part());
        let is_excluded =
            if matches!(node, Node::Object(_)) { selection.excludes_object(scope) } else { selection.excludes(scope) };
        let is_excluded = is_excluded || (self.within == 0 && selection.excludes_value(scope, id));
        (!is_excluded).then_some(scope)
    }

    fn object(&mut self, id: NodeId, object: &Object, scope: NameScope) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let is_torch = |module: &str| module == "torch._utils";
        let global = self.graph.global(object.callable);
        if let Some((module, "_rebuild_tensor_v2")) = global
            && is_torch(module)
            && let Some(tensor) = self.tensor(object)?
        {
            self.built[id.index()] = Some(tensor.clone());
            return self.finish(tensor, object, scope);
        }
        let is_container = global.is_some_and(|global| WITHOUT_TENSOR.contains(&global));
        self.within += usize::from(!is_container);
        let callable = self.build(object.callable, scope)?;
        // A parameter has its tensor's name. Its other arguments have no names.
        let is_parameter =
            global.is_some_and(|(module, function)| is_torch(module) && function.starts_with("_rebuild_parameter"));
        let arguments = match self.graph.tuple(object.arguments) {
            Some(elements) if is_parameter && elements.len() <= PARAMETER_ARGUMENTS_MAX => {
                let built =
                    elements.iter().map(|element| self.argument(*element, scope)).collect::<PyResult<Vec<_>>>()?;
                PyTuple::new(py, built)?.into_any()
            }
            Some(elements) if matches!(elements.first(), Some(id) if self.is_storage(*id)) => {
                let built =
                    elements.iter().map(|element| self.argument(*element, scope)).collect::<PyResult<Vec<_>>>()?;
                PyTuple::new(py, built)?.into_any()
            }
            _ => self.build(object.arguments, scope)?,
        };
        let built = match object.make {
            Make::Call => self.factory.call_method1(intern!(py, "call"), (callable, arguments))?,
            Make::NewObject => {
                let keywords = object.keywords.map(|keywords| self.build(keywords, scope)).transpose()?;
                self.factory.call_method1(intern!(py, "new"), (callable, arguments, keywords))?
            }
        };
        self.built[id.index()] = Some(built.clone());
        let finished = self.finish(built, object, scope);
        self.within -= usize::from(!is_container);
        finished
    }

    fn is_storage(&self, id: NodeId) -> bool {
        matches!(self.graph.node(id), Node::Persistent(_))
    }

    /// Builds an argument of a call. The call needs a storage itself; other arguments are objects of the state.
    fn argument(&mut self, id: NodeId, scope: NameScope) -> PyResult<Bound<'py, PyAny>> {
        match self.graph.node(id) {
            Node::Persistent(key) => self.storage(*key, intern!(self.py, "storage")),
            _ => self.build(id, scope),
        }
    }

    /// Adds the items, elements and state that an object receives after construction.
    fn finish(&mut self, built: Bound<'py, PyAny>, object: &Object, scope: NameScope) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let refuse = |what: &str| {
            let class = built.get_type();
            let text = format!("the file {what} an object of {class}, which has none; it is damaged or hostile");
            Err(error::plain(py, "CorruptFileError", text))
        };
        // A class that the user allowed is as free here as in its `__setstate__`.
        let takes_parts = || self.factory.call_method1(intern!(py, "takes_parts"), (&built,))?.is_truthy();
        if !object.items.is_empty() {
            if !built.is_instance_of::<PyDict>() && !takes_parts()? {
                return refuse("sets items of");
            }
            self.items(&object.items, scope, &mut |key, value| built.set_item(key, value))?;
        }
        if !object.elements.is_empty() {
            let method = if built.is_instance_of::<PyList>() {
                intern!(self.py, "append")
            } else if built.is_instance_of::<PySet>() {
                intern!(self.py, "add")
            } else if takes_parts()? {
                intern!(self.py, "append")
            } else {
                return refuse("adds elements to");
            };
            let elements = self.elements(&object.elements, scope)?;
            if built.is_instance_of::<PySet>() {
                self.costs.charge(elements.iter(), TableKind::Set)?;
            }
            for element in elements {
                self.check_signals()?;
                built.call_method1(method, (element,))?;
            }
        }
        for state in &object.states {
            let state = self.build(*state, scope)?;
            self.factory.call_method1(intern!(self.py, "give_state"), (&built, state))?;
        }
        Ok(built)
    }

    /// Builds an ordinary tensor of a typed storage; `None` for all others. This is the fast path for the most common
    /// object.
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

    /// Returns the storage of a persistent id and the name of its element type.
    fn untyped(&self, key: NodeId) -> PyResult<(Bound<'py, PyAny>, &'static str)> {
        let corrupt = |text: String| error::plain(self.py, "CorruptFileError", text);
        let described = storage(self.graph, key).map_err(|error| corrupt(error.to_string()))?;
        let index = self.by_key.get(described.key.as_str()).copied();
        let index = index.ok_or_else(|| corrupt(format!("there is no storage {:?}", described.key)))?;
        Ok((self.storages.get_item(index)?, described.dtype.map_or("uint8", deepnvme_format::Dtype::torch_name)))
    }
}
