"""`save` refuses by name what `load` would refuse. Everything else is restored."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

import deepnvme
from deepnvme import errors
from deepnvme.integrations.dcp import DeepnvmeWriter

from .states import DTYPES, assert_same
from .states import random as random_tensor

pytestmark = pytest.mark.filterwarnings("ignore")

BITS = [name for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "bcomplex32") if hasattr(torch, name)]
NARROW = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8) if hasattr(torch, f"{sign}int{bits}")]


def typed(name: str) -> torch.Tensor:
    storage = torch.arange(16, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=getattr(torch, name)).set_(storage, 0, (4,), (1,))


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize("name", BITS)
def test_rare_types_come_back(tmp_path: Path, name: str) -> None:
    tensor = typed(name)
    for write in (deepnvme.save, torch.save):
        write({"a": tensor}, tmp_path / "x.pt")
        for loaded in (deepnvme.load(tmp_path / "x.pt")["a"], torch.load(tmp_path / "x.pt")["a"]):
            assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
            assert bytes(loaded.untyped_storage().tolist()) == bytes(range(16))


def packed(name: str) -> torch.Tensor:
    return torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=getattr(torch, name))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{name: (partial(typed, name), "element type") for name in NARROW},
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), "zero tensors"),
    "quint4x2": (lambda: packed("quint4x2"), "quint4x2"),
    "bytes as quint4x2": (lambda: torch.arange(8, dtype=torch.uint8).view(torch.quint4x2), "share bytes"),
    "bytes as quint2x4": (lambda: torch.arange(8, dtype=torch.uint8).view(torch.quint2x4), "share bytes"),
    "65 dimensions": (lambda: torch.ones([1] * 65), "64 dimensions"),
    "65 dimensions with an attribute": (lambda: torch.nn.Parameter(torch.ones([1] * 65)), "64 dimensions"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
    "a layout of oneDNN": (lambda: torch.ones(4, 4).to_mkldnn(), "to_dense"),
    "depth": (lambda: nested(520, torch.ones(2)), "deep"),
    "depth of values": (lambda: nested(520, 7), "deep"),
    "a name": (lambda: {"n" * 4097: torch.ones(2)}, "4096 bytes"),
    "a name of many parts": (lambda: {"n" * 2000: {"m" * 2000: [[{"o" * 200: torch.ones(2)}]]}}, "4096 bytes"),
    "an integer": (lambda: 1 << 40_000, "integer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_tensors_are_named(tmp_path: Path, what: str) -> None:
    make, reason = REFUSED[what]
    path = tmp_path / "x.pt"
    path.write_bytes(b"old")
    with pytest.raises(errors.InvalidArgumentError, match=reason) as caught:
        deepnvme.save({"fine": torch.ones(1), "the key": make()}, path)
    assert "the key" in str(caught.value) or what in ("an integer", "depth", "depth of values")
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_states_within_the_limits_are_restored(tmp_path: Path) -> None:
    state = {
        "dims": torch.ones([1] * 64),
        "deep": nested(190, torch.ones(2)),
        "deeper": nested(190, 7),
        "n" * 4096: torch.ones(1),
    }
    deepnvme.save(state, tmp_path / "x.pt")
    assert_same(deepnvme.load(tmp_path / "x.pt"), state)


def _save_in_the_background(state: Any, path: Path) -> None:
    with deepnvme.Checkpointer(path.parent / "c", format="safetensors", async_=True) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()


WAYS: dict[str, Callable[[Any, Path], object]] = {
    "one file": deepnvme.save,
    "shards": lambda state, path: deepnvme.save(state, path, max_shard_bytes=1),
    "checkpointer": lambda state, path: deepnvme.Checkpointer(path.parent / "c", format="safetensors").save(1, state),
    "in the background": _save_in_the_background,
}


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "int_repr"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.ones([1] * 65), "64 dimensions"),
        (torch.ones(3, dtype=torch.complex128), "complex128"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_safetensors_files_say_which_tensor_they_cannot_hold(
    tmp_path: Path, way: str, tensor: torch.Tensor, word: str
) -> None:
    state = {"fine": torch.ones(1), "the key": tensor}
    with pytest.raises((TypeError, ValueError), match=word) as caught:
        WAYS[way](state, tmp_path / "x.safetensors")
    assert "the key" in str(caught.value)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_distributed_checkpoint_says_which_tensor_it_cannot_hold(tmp_path: Path) -> None:
    writer = DeepnvmeWriter(tmp_path)
    with pytest.raises(CheckpointException, match=r"the key.*sparse_coo.*to_dense"):
        save({"the key": torch.eye(3).to_sparse()}, storage_writer=writer, no_dist=True)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_may_have_sparse_tensors(tmp_path: Path, is_async: bool) -> None:
    with deepnvme.Checkpointer(tmp_path, async_=is_async) as checkpointer:
        checkpointer.save(1, {"a": torch.eye(3).to_sparse()})
        checkpointer.wait()
        assert checkpointer.restore()["a"].to_dense().equal(torch.eye(3))


PLAIN: list[Any] = [
    None, True, -1, 255, 65536, -(2**31), 2**31, 2**63, 2**70, -(2**70), 1 << 40_000, 0.5, float("inf"), "", "text",
    "\udcff", "ä" * 9, b"", b"\xff\x00", bytearray(b"x"), 1j, {1, 2}, frozenset({"a"}), torch.Size([1]), torch.float16,
    torch.device("cpu"), (), [], {}, torch.eye(2).to_sparse(),
]  # fmt: skip
KEYS = ["a", "b.c", "", 1, "1", None, True, 2.5, (1, "x"), "\udcff", "ä", b"k", "n" * 1500, -1, 2**70]


def tensor_of(rng: random.Random) -> torch.Tensor:
    shape = tuple(rng.randrange(4) for _ in range(rng.choice([0, 1, 1, 2, 3])))
    tensor = random_tensor(shape, rng.choice(DTYPES), rng.randrange(100))
    change = rng.randrange(8)
    if change == 0 and tensor.dim() > 1:
        tensor = tensor.transpose(0, tensor.dim() - 1)
    elif change == 1 and tensor.is_complex():
        tensor = tensor.conj()
    elif change == 2:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    elif change == 3:
        tensor.note = rng.choice(["text", 5, None])  # type: ignore[attr-defined]
    return tensor


def value(rng: random.Random, depth: int) -> Any:
    """Return a random state, with rare and refused objects."""
    kind = rng.randrange(24 if depth else 14)
    count = rng.randrange(4)
    made: Any
    if kind < 6:
        made = tensor_of(rng)
    elif kind == 6:
        made = typed(rng.choice(BITS + NARROW))
    elif kind < 14:
        made = rng.choice(PLAIN)
    elif kind < 18:
        made = {rng.choice(KEYS): value(rng, depth - 1) for _ in range(count)}
        made = OrderedDict(made) if kind == 17 else made
    elif kind < 23:
        made = [value(rng, depth - 1) for _ in range(count)]
        made = tuple(made) if kind < 20 else made
    else:
        made = nested(rng.choice([2, 30, 190, 520]), value(rng, 0))
    return made


def test_a_random_state_comes_back_or_is_refused(tmp_path: Path) -> None:
    came_back = 0
    for seed in range(600):
        state = {"x": value(random.Random(seed), 4), "y": value(random.Random(-seed - 1), 4)}
        for suffix in (".pt", ".safetensors") if seed % 4 == 0 else (".pt",):
            path = tmp_path / f"x{suffix}"
            with contextlib.suppress(ValueError, TypeError):
                deepnvme.save(state, path, durability="none")
                loaded = deepnvme.load(path, verify="full")
                assert suffix == ".safetensors" or repr_of(loaded) == repr_of(state), seed
                came_back += 1
                continue
            # `save` refused it, so there is no file.
            assert not path.exists() or path.stat().st_size == 0 or came_back, seed
    assert came_back > 300


def repr_of(made: Any) -> str:
    """Return a value as text, with all its details."""
    if isinstance(made, torch.Tensor):
        if made.layout is not torch.strided:
            return f"{made.layout} {made.to_dense()}"
        flat = made.detach().resolve_conj().contiguous().view(-1)
        raw = torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())
        content = bytes(raw.tolist()) if flat.numel() else b""
        return f"{type(made)} {made.dtype} {made.shape} {made.stride()} {made.is_conj()} {vars(made)} {content!r}"
    if isinstance(made, dict):
        items = ", ".join(f"{key!r}: {repr_of(element)}" for key, element in made.items())
        return f"{type(made)} {items}"
    if type(made) in (list, tuple):
        return f"{type(made)} [{', '.join(repr_of(element) for element in made)}]"
    return f"{type(made)} {made!r}"


class Unpicklable:
    """Contains a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [threading.Lock, Unpicklable, lambda: (i for i in range(3)), lambda: lambda: 0])
def test_an_object_that_cannot_be_pickled_is_named(tmp_path: Path, make: Callable[[], object]) -> None:
    path = tmp_path / "a.pt"
    deepnvme.save({"a": torch.ones(3)}, path)
    state = {"a": torch.zeros(3), "deep": [{}, {"first": 1, "f": [{"x"}, make()]}]}
    with pytest.raises(TypeError, match=re.escape("['deep'][1]['f'][1]: this object cannot")):
        deepnvme.save(state, path)
    with pytest.raises(TypeError, match=r"^the state: this object cannot"):
        deepnvme.save(make(), path)
    with (
        deepnvme.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.raises(TypeError, match=re.escape("['deep'][1]['f'][1]")),
    ):
        checkpointer.save(1, state)
    assert torch.equal(deepnvme.load(path)["a"], torch.ones(3))
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["a.pt"]


def test_an_object_that_torch_cannot_build_on_a_device_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    deepnvme.save({"a": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)}, path)
    with pytest.raises(errors.UnsupportedError, match=r"a\.pt: torch cannot build .* load them on another$"):
        deepnvme.load(path, device="meta")


def test_a_sparse_tensor_cannot_be_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    deepnvme.save({"a": torch.eye(4).to_sparse()}, path)
    for target in (torch.zeros(4, 4), torch.zeros(4, 4).to_sparse()):
        with pytest.raises(KeyError, match=r"a\.pt: the file contains no dense tensor called a;"):
            deepnvme.load(path, into={"a": target})


def test_tensors_without_values_are_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)
    path = tmp_path / "a.pt"
    with pytest.warns(
        UserWarning, match=r"meta device, so the file has their shapes and no values: \['m'\]\['weight'\], "
    ):
        deepnvme.save({"m": model.state_dict(), "x": torch.ones(2)}, path)
    loaded = deepnvme.load(path)
    assert loaded["m"]["weight"].is_meta
    assert loaded["x"].equal(torch.ones(2))
    with pytest.raises(TypeError, match="'weight': this tensor is on the meta device and has no values; initialise"):
        deepnvme.save(model.state_dict(), tmp_path / "a.safetensors")
