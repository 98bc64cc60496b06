"""The cost of loading a file is bounded for any keys and attributes, and Ctrl-C ends every load."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _utils

import deepnvme
from deepnvme import errors
from deepnvme.integrations.weights import iterate_weights
from programs import program

from .states import assert_same
from .test_bombs import bomb, view
from .test_hostile import Runs, archive

# Python hashes an integer to its remainder.
MODULUS = (1 << 61) - 1
MANY = 60_000


def pushed(keys: Iterable[Any]) -> bytes:
    """Instructions that push keys on the stack, without a memo."""
    out = []
    for key in keys:
        dumped = pickle.dumps(key, 4)
        out.append(dumped[2:-1] if dumped[2:3] != b"\x95" else dumped[11:-1])
    return b"".join(out)


def as_dict(keys: list[Any]) -> bytes:
    return b"\x80\x04}(" + b"N".join(pushed([key]) for key in keys) + b"Nu."


def as_ordered(keys: list[Any]) -> bytes:
    return b"\x80\x04ccollections\nOrderedDict\n)R(" + b"N".join(pushed([key]) for key in keys) + b"Nu."


def as_set(keys: list[Any]) -> bytes:
    return b"\x80\x04\x8f(" + pushed(keys) + b"\x90."


def as_frozen_set(keys: list[Any]) -> bytes:
    return b"\x80\x04(" + pushed(keys) + b"\x91."


def called(name: str) -> Any:
    def of(keys: list[Any]) -> bytes:
        return b"\x80\x04c" + name.encode() + b"\n](" + pushed(keys) + b"e\x85R."

    return of


def as_pairs(keys: list[Any]) -> bytes:
    return b"\x80\x04ccollections\nOrderedDict\n](" + b"".join(pushed([key]) + b"N\x86" for key in keys) + b"e\x85R."


CONTAINERS: dict[str, Callable[[list[Any]], bytes]] = {
    "dict": as_dict, "ordered": as_ordered, "set": as_set, "frozen set": as_frozen_set,
    "called set": called("builtins\nset"), "called frozen set": called("builtins\nfrozenset"),
    "counter": called("collections\nCounter"), "pairs": as_pairs,
}  # fmt: skip

KEYS: dict[str, Callable[[], list[Any]]] = {
    "integers": lambda: [MODULUS * index for index in range(1, MANY)],
    "tuples": lambda: [(MODULUS * index, 1) for index in range(1, MANY)],
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("keys", ["integers", "tuples"])
def test_keys_that_collide_are_refused(tmp_path: Path, container: str, keys: str) -> None:
    path = archive(tmp_path / "x.pt", CONTAINERS[container](KEYS[keys]()))
    for lazy in (False, True):
        began = time.perf_counter()
        with pytest.raises(errors.UnsafeFileError, match=r"x\.pt.*more than [12]\d{7} steps"):
            deepnvme.load(path, lazy=lazy)
        # A second on an idle machine.
        assert time.perf_counter() - began < 10


def test_costs_add_up(tmp_path: Path) -> None:
    """Each dict alone is within the limit."""
    one = as_dict([MODULUS * index for index in range(1, 3000)])[2:-1]
    path = archive(tmp_path / "x.pt", b"\x80\x04](" + one * 100 + b"e.")
    with pytest.raises(errors.UnsafeFileError, match="steps"):
        deepnvme.load(path)


def test_a_tuple_that_is_hashed_again_and_again(tmp_path: Path) -> None:
    long = b"(" + b"K\x01" * 50_000 + b"t\x94"
    sets = b"](h\x00e\x94" + b"cbuiltins\nset\n\x94" + b"](" + b"h\x02h\x01\x85R" * 20_000 + b"e."
    path = archive(tmp_path / "x.pt", b"\x80\x04" + long + b"0" + sets)
    with pytest.raises(errors.UnsafeFileError, match=r"steps|again and again"):
        deepnvme.load(path)


def test_keys_that_are_honest_are_loaded(tmp_path: Path) -> None:
    rng = random.Random(5)
    state = {
        "row": dict.fromkeys(range(300000)),
        "spread": {rng.randrange(1 << 63): None for _ in range(100_000)},
        "pages": {index << 12: None for index in range(100_000)},
        "high": {index << 40: None for index in range(20_000)},
        "negative": {-index: None for index in range(100_000)},
        "halves": {index / 2: None for index in range(100_000)},
        "pairs": {(left, right): None for left in range(-150, 150) for right in range(-150, 150)},
        "texts": {f"layers.{index}": None for index in range(100_000)},
        "sets": [
            set(range(100_000)),
            frozenset(rng.randrange(1 << 63) for _ in range(100_000)),
            {True, 1.5, "x", None},
        ],
        "small": [{index: index, -1: 2, -2: 3} for index in range(30_000)],
        "ordered": OrderedDict((index * 7, None) for index in range(50_000)),
        "counter": Counter(rng.randrange(1000) for _ in range(50_000)),
    }
    for protocol in (2, 4):
        torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
        assert_same(deepnvme.load(tmp_path / "x.pt"), state)


def test_attributes_are_not_copied_without_end(tmp_path: Path) -> None:
    state = {f"a{index}": None for index in range(20_000)}
    parameter = Runs(_utils._rebuild_parameter_with_state, view(4, stride=1), False, OrderedDict(), state)
    typed = Runs(
        torch._tensor._rebuild_from_type_v2, _utils._rebuild_tensor_v2, torch.Tensor, view(4, stride=1).made[1], state
    )
    for made in (parameter, typed):
        many = [Runs(*[made.made[0], *made.made[1]]) for _ in range(2000)]
        with pytest.raises(errors.UnsafeFileError, match=r"again and again|steps"):
            deepnvme.load(bomb(tmp_path / "x.pt", many))
    ordered = b"ccollections\nOrderedDict\n)R"
    data = (
        b"\x80\x02"
        + pickle.dumps(state, 2)[2:-1]
        + b"r\xff\xff\xff\x00]("
        + (ordered + b"j\xff\xff\xff\x00b") * 2000
        + b"e."
    )
    with pytest.raises(errors.UnsafeFileError, match=r"again and again|steps"):
        deepnvme.load(archive(tmp_path / "x.pt", data))


@pytest.mark.parametrize("name", ["__setstate__", "__reduce_ex__", "__class__", "__deepcopy__", "__torch_function__"])
def test_names_that_python_looks_up_are_no_attributes(tmp_path: Path, name: str) -> None:
    """Copying, pickling or restoring the object would call this attribute."""
    state = {name: bytearray}
    made = Runs(_utils._rebuild_parameter_with_state, view(4, stride=1), False, OrderedDict(), state)
    with pytest.raises(errors.UnsafeFileError, match=name):
        deepnvme.load(bomb(tmp_path / "x.pt", made))
    data = b"\x80\x02ccollections\nOrderedDict\n)R" + pickle.dumps(state, 2)[2:-1] + b"b."
    with pytest.raises(errors.UnsafeFileError, match=name):
        deepnvme.load(archive(tmp_path / "x.pt", data))


def test_the_state_of_a_parameter_does_not_grow_its_storage(tmp_path: Path) -> None:
    head = b"\x80\x02ctorch._utils\n_rebuild_parameter\nctorch\nTensor\n)R\x89N\x87R"
    for state in (
        b"\x8a\x06\x00\x00\x00\x00\x00\x7fb.",
        b"(NK\x00\x8a\x06\x00\x00\x00\x00\x00\x7f\x85K\x01\x85tb.",
        b")b.",
    ):
        with pytest.raises((errors.UnsafeFileError, errors.CorruptFileError)):
            deepnvme.load(archive(tmp_path / "x.pt", head + state))


def test_pairs_are_looked_at_before_they_are_taken_apart(tmp_path: Path) -> None:
    made = Runs(OrderedDict, [view(10**12)])
    with pytest.raises(errors.UnsafeFileError, match="pairs"):
        deepnvme.load(bomb(tmp_path / "x.pt", made))


CHILD = """
import contextlib, pathlib, sys, torch, deepnvme
from deepnvme._checkpoint.dcp import values as _dcp_values
path, way = sys.argv[1], sys.argv[2]
deepnvme.save({"a": torch.ones(2)}, path + ".warm"); deepnvme.load(path + ".warm", lazy=True)["a"].sum()
ways = {
    "load": lambda: deepnvme.load(path), "lazy": lambda: deepnvme.load(path, lazy=True),
    "into": lambda: deepnvme.load(path, into={"a": torch.empty(4)}),
    "object": lambda: _dcp_values.repickle_safely(pathlib.Path(path).read_bytes(), pathlib.Path(path), "x", None),
}
print("ready", flush=True)
while True:
    with contextlib.suppress(KeyError):
        ways[way]()
"""


@pytest.mark.parametrize("way", ["load", "lazy", "into", "object"])
def test_ctrl_c_ends_a_load(tmp_path: Path, way: str) -> None:
    # Millions of objects, and a dict whose keys are looked up with many probes. Nothing of it is refused.
    few = as_dict([MODULUS * index for index in range(1, 600)])[2:-1]
    path = archive(tmp_path / "x.pt", b"\x80\x04](" + few + b"](" + b"]" * 2_000_000 + b"ee.")
    with program(CHILD, path, way) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.7)
        child.interrupt()
        began = time.perf_counter()
        child.stdout.read()
        took = time.perf_counter() - began
    assert child.errors.rstrip().endswith("KeyboardInterrupt"), child.errors
    # A second, with slack for a busy machine and the end of the interpreter.
    assert took < 5


def test_objects_that_take_too_much_memory_are_refused(tmp_path: Path) -> None:
    for element, count in ((b"]", 12_000_000), (b"\x8f", 6_000_000), (b"}", 12_000_000)):
        path = archive(tmp_path / "x.pt", b"\x80\x04](" + element * count + b"e.")
        began = time.monotonic()
        with pytest.raises(errors.UnsupportedError, match="would take more than"):
            deepnvme.load(path)
        assert time.monotonic() - began < 10


def test_other_threads_run_while_objects_are_made(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x04](" + b"]" * 5_000_000 + b"e.")
    longest, is_done = 0.0, threading.Event()

    def wait() -> None:
        nonlocal longest
        last = time.monotonic()
        while not is_done.wait(0.001):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    waiter = threading.Thread(target=wait)
    waiter.start()
    began = time.monotonic()
    # The list is freed at once by this thread, which takes long as well.
    made = deepnvme.load(path)
    took = time.monotonic() - began
    is_done.set()
    waiter.join()
    assert len(made) == 5_000_000
    assert longest < max(0.5, took / 2)


def collections_during(work: Callable[[], object]) -> int:
    """Count the runs of Python's collector, which may run after each hundred objects."""
    phases: list[str] = []
    gc.collect()
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: phases.append(phase))
    gc.set_threshold(100)
    try:
        work()
        return phases.count("stop")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_collector_does_not_run_among_many_tensors(tmp_path: Path, suffix: str) -> None:
    """Each run may search the whole process, which takes longer than to load ten thousand small tensors."""
    state = {str(index): torch.zeros(1) for index in range(5000)}
    path = tmp_path / f"a{suffix}"

    def refused() -> None:
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            deepnvme.save({"a": lambda: None}, tmp_path / f"b{suffix}")

    def lazily() -> object:
        return [tensor.materialize() for tensor in deepnvme.load(path, lazy=True).values()]

    def in_order() -> None:
        for _, tensor in iterate_weights(path):
            del tensor

    ways: list[Callable[[], object]] = [
        lambda: deepnvme.save(state, path),
        refused,
        lambda: deepnvme.load(path),
        lambda: deepnvme.load(path, only=["1*"]),
        lambda: deepnvme.load(path, into=state),
        lazily,
        *([in_order] if suffix == ".safetensors" else []),
    ]
    # It may run before and after.
    assert [count for count in map(collections_during, ways) if count > 20] == []
    assert gc.isenabled()
