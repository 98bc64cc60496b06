//! Pickles and their tensors.

use std::collections::HashSet;

use deepnvme_format::Dtype;
use deepnvme_format::pickle::{self, Graph, Node, NodeId, PickleWriter, TensorView};
use deepnvme_format::state::{NAME_BYTES_MAX, NON_TENSORS_MAX, PickledState, Tensor, non_tensors};

/// Checks a pickle.
pub(crate) fn pickle(bytes: &[u8]) {
    let Ok(graph) = pickle::parse(bytes) else { return };
    check_graph(&graph, bytes.len());
    let others = non_tensors(&graph);
    assert!(others.len() <= NON_TENSORS_MAX && others.iter().all(|(name, _)| name.len() <= NAME_BYTES_MAX));
    let Ok(state) = PickledState::of(&graph) else { return };
    check_state(&state);
    write_again(&state);
}

/// Checks that there are no more objects than bytes, no dangling references, and no impossible order.
fn check_graph(graph: &Graph, bytes: usize) {
    assert!(!graph.is_empty() && graph.len() <= bytes);
    assert!(graph.root().index() < graph.len());
    let mut references = 0;
    for (index, node) in graph.nodes().iter().enumerate() {
        let older = |ids: &[NodeId]| ids.iter().all(|id| id.index() < index);
        let mut check = |ids: &mut dyn Iterator<Item = &NodeId>| {
            for id in ids {
                assert!(id.index() < graph.len());
                references += 1;
            }
        };
        match node {
            Node::Tuple(ids) => assert!(older(ids)),
            Node::FrozenSet(ids) => assert!(older(ids)),
            Node::Global(module, name) => {
                assert!(older(&[*module, *name]) && graph.global(NodeId::clone(module)).is_none());
            }
            Node::Persistent(key) => assert!(older(&[*key])),
            Node::List(ids) | Node::Set(ids) => check(&mut ids.iter()),
            Node::Dict(items) => check(&mut items.iter().flat_map(|(key, value)| [key, value])),
            Node::Object(object) => {
                assert!(older(&[object.callable, object.arguments]) && graph.tuple(object.arguments).is_some());
                check(&mut object.items.iter().flat_map(|(key, value)| [key, value]));
                check(&mut object.elements.iter().chain(&object.states).chain(&object.keywords));
            }
            _ => {}
        }
    }
    // Each reference was pushed by a byte of its own.
    assert!(references <= bytes, "{references} references in {bytes} bytes");
}

/// Checks that every tensor lies in its storage, by arithmetic that cannot overflow.
fn check_state(state: &PickledState) {
    let keys: HashSet<&str> = state.storages.iter().map(|storage| storage.key.as_str()).collect();
    assert_eq!(keys.len(), state.storages.len());
    for tensor in &state.tensors {
        assert!(tensor.name.len() <= NAME_BYTES_MAX);
        assert_eq!(tensor.view.shape.len(), tensor.view.strides.len());
        let (width, storage_bytes) = (tensor.dtype.bytes(), state.storages[tensor.storage].bytes);
        super::assert_countable(&tensor.view.shape, width);
        assert_eq!(u128::from(tensor.bytes()), super::exact_bytes(&tensor.view.shape, width));
        assert!(tensor.view.offset <= i64::MAX.unsigned_abs() / width);
        if tensor.bytes() > 0 {
            let steps = tensor.view.shape.iter().zip(&tensor.view.strides);
            let steps = steps.map(|(size, stride)| u128::from(size - 1) * u128::from(*stride));
            let last = u128::from(tensor.view.offset) + steps.sum::<u128>();
            assert!((last + 1) * u128::from(width) <= storage_bytes.into(), "{tensor:?} in {storage_bytes} bytes");
        }
    }
}

/// Writes the same tensors, each with its own storage, as a flat state.
fn write_again(state: &PickledState) {
    // A storage that exceeds a signed number cannot be written.
    let can_be_written = |tensor: &&Tensor| i64::try_from(state.storages[tensor.storage].bytes).is_ok();
    let tensors: Vec<&Tensor> = state.tensors.iter().filter(can_be_written).take(100).collect();
    let mut emitter = PickleWriter::default();
    emitter.raw(b"}(");
    for (key, tensor) in tensors.iter().enumerate() {
        emitter.text(&tensor.name);
        emitter.tensor(&TensorView {
            key,
            dtype: tensor.dtype,
            storage_elements: state.storages[tensor.storage].bytes / tensor.dtype.bytes(),
            offset: tensor.view.offset,
            shape: &tensor.view.shape,
            strides: &tensor.view.strides,
            requires_grad: false,
            signs: tensor.signs,
        });
    }
    emitter.raw(b"u");
    let again = PickledState::of(&pickle::parse(&emitter.finish()).unwrap()).unwrap();
    let known = |tensor: &Tensor| (tensor.name.clone(), tensor.dtype, tensor.view.clone());
    let wanted: Vec<_> = tensors.into_iter().map(known).collect();
    assert_eq!(again.tensors.iter().map(known).collect::<Vec<_>>(), wanted);
}
