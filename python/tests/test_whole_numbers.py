"""Every whole number that callers pass: what does not fit is an error that names the argument."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme
from deepnvme.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

BIG = [1 << 64, 1 << 70, 10**400, 10**5000, -(1 << 70)]
NOT_WHOLE: list[Any] = [True, 1.0, 0.5, float("nan"), float("inf"), "x", b"1", [], object()]
Call = Callable[[Path, Any], object]


def swapper(folder: Path, **options: Any) -> deepnvme.Swapper:
    return deepnvme.Swapper(folder, **{"memory": 1 << 20, **options})


def with_item(folder: Path, act: Callable[[deepnvme.Swapper], object]) -> None:
    with_memory = swapper(folder)
    try:
        with_memory.put("w", torch.zeros(10))
        act(with_memory)
    finally:
        with_memory.close()


def offloaded(folder: Path, memory: Any) -> None:
    deepnvme.offload_parameters(torch.nn.Linear(4, 4), memory=memory, swap_dir=folder)


def optimizer(folder: Path, **options: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    deepnvme.optim.AdamW(parameters, swap_dir=folder, **{"memory": 1 << 20, **options})


def streamed(folder: Path, **options: Any) -> None:
    module = torch.nn.Linear(4, 4)
    deepnvme.save(module.state_dict(), folder / "w.safetensors")
    deepnvme.stream(module, weights=folder / "w.safetensors", **{"memory": 1 << 20, **options}).streaming.close()


def weights(folder: Path, nbytes: Any) -> None:
    from deepnvme.integrations.weights import iterate_weights

    deepnvme.save({"a": torch.zeros(3)}, folder / "w.safetensors")
    list(iterate_weights(folder / "w.safetensors", prefetch_bytes=nbytes))


def handle(**options: Any) -> None:
    from deepnvme.deepspeed import aio_handle

    aio_handle(**options)


def file(folder: Path) -> Path:
    (folder / "file").write_bytes(bytes(100))
    return folder / "file"


def reader(folder: Path, act: Callable[[Any], object]) -> None:
    with deepnvme.open(file(folder)) as opened:
        act(opened)


def traced(folder: Path, start: Any, end: Any) -> None:
    with deepnvme.trace(folder / "trace.json") as trace:
        trace.span("name", "lane", start, end)


def checkpointer(folder: Path, act: Callable[[Any], object] | None = None, **options: Any) -> None:
    with deepnvme.Checkpointer(folder / "run", **options) as opened:
        if act is not None:
            act(opened)


NOW = time.monotonic_ns()
SHARDS = {"max": {"a": torch.zeros(3), "b": torch.zeros(3)}}
ARGUMENTS: dict[str, Call] = {
    "workers": lambda _, value: deepnvme.Engine(workers=value),
    "queue_depth": lambda _, value: deepnvme.Engine(queue_depth=value),
    "block_bytes": lambda _, value: deepnvme.Engine(block_bytes=value),
    "pool_bytes": lambda _, value: deepnvme.Engine(pool_bytes=value),
    "offset": lambda folder, value: deepnvme.read(bytearray(4), file(folder), value),
    "offset of a write": lambda folder, value: deepnvme.write(b"abcd", file(folder), offset=value),
    "offset of start_read": lambda folder, value: deepnvme.start_read(bytearray(4), file(folder), value).result(),
    "offset of start_write": lambda folder, value: deepnvme.start_write(b"abcd", file(folder), value).result(),
    "offset in a batch": lambda folder, value: deepnvme.read_batch([(file(folder), value, bytearray(4))]),
    "offset in a batch of writes": lambda folder, value: deepnvme.write_batch([(file(folder), value, b"abcd")]),
    "start_ns": lambda _, value: deepnvme.span("name", "lane", value, NOW),
    "end_ns": lambda _, value: deepnvme.span("name", "lane", 0, value),
    "start_ns of an engine": lambda _, value: deepnvme.default_engine().span("name", "lane", value, NOW),
    "start_ns of a trace": lambda folder, value: traced(folder, value, NOW),
    "end_ns of a trace": lambda folder, value: traced(folder, 0, value),
    "stripe_bytes": lambda folder, value: deepnvme.StripeSet([folder / "a", folder / "b"], stripe_bytes=value),
    "size of read": lambda folder, value: reader(folder, lambda opened: opened.read(value)),
    "size of read1": lambda folder, value: reader(folder, lambda opened: opened.read1(value)),
    "offset of seek": lambda folder, value: reader(folder, lambda opened: opened.seek(value)),
    "whence of seek": lambda folder, value: reader(folder, lambda opened: opened.seek(0, value)),
    "shape": lambda _, value: deepnvme.pinned_empty([value, 0]),
    "shape of one size": lambda _, value: deepnvme.pinned_empty((value,)),
    "max_shard_bytes": lambda folder, value: deepnvme.save(
        SHARDS["max"], folder / "a.safetensors", max_shard_bytes=value
    ),
    "keep": lambda folder, value: checkpointer(folder, keep=value),
    "every": lambda folder, value: checkpointer(folder, every=value),
    "memory": lambda folder, value: checkpointer(folder, memory=value),
    "writers_per_node": lambda folder, value: checkpointer(folder, writers_per_node=value),
    "step": lambda folder, value: checkpointer(folder, lambda opened: opened.save(value, {"a": 1})),
    "step of restore": lambda folder, value: checkpointer(folder, lambda opened: opened.restore(value)),
    "memory of a swapper": lambda folder, value: swapper(folder, memory=value).close(),
    "prefetch_bytes of a swapper": lambda folder, value: swapper(folder, prefetch_bytes=value).close(),
    "headroom_bytes of a swapper": lambda folder, value: swapper(folder, headroom_bytes=value).close(),
    "stripe_bytes of a swapper": lambda folder, value: swapper(folder, stripe_bytes=value).close(),
    "a dimension of 'w'": lambda folder, value: with_item(
        folder, lambda made: made.create("w", [value, 3], torch.float32)
    ),
    "offset of Swapper.read": lambda folder, value: with_item(
        folder, lambda made: made.read("w", value, torch.empty(1))
    ),
    "offset of Swapper.write": lambda folder, value: with_item(
        folder, lambda made: made.write("w", value, torch.empty(1))
    ),
    "offset of attach": lambda folder, value: with_item(folder, lambda made: made.attach("a", file(folder), value, 8)),
    "nbytes of attach": lambda folder, value: with_item(folder, lambda made: made.attach("a", file(folder), 0, value)),
    "memory of an optimizer": lambda folder, value: optimizer(folder, memory=value),
    "threads": lambda folder, value: optimizer(folder, threads=value),
    "seed": lambda folder, value: optimizer(folder, seed=value),
    "memory of parameters": offloaded,
    "memory of a model": lambda folder, value: streamed(folder, memory=value),
    "prefetch_layers of a model": lambda folder, value: streamed(folder, prefetch_layers=value),
    "prefetch_bytes of weights": weights,
    "block_size": lambda _, value: handle(block_size=value),
    "queue_depth of aio_handle": lambda _, value: handle(queue_depth=value),
    "intra_op_parallelism": lambda _, value: handle(intra_op_parallelism=value),
}
# They also take a text such as "4GB".
SIZES = {name for name in ARGUMENTS if name.startswith("memory") or name.split(" ")[0].endswith("_bytes")}
AS_INTEGERS = {"block_size", "queue_depth of aio_handle", "intra_op_parallelism"}


def word(argument: str) -> str:
    return argument.removesuffix(" 'w'").split(" of ")[0].split(" in ")[0].removeprefix("a ")


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_number_that_does_not_fit_is_named(tmp_path: Path, argument: str) -> None:
    for value in BIG:
        with pytest.raises(ValueError, match=word(argument)) as caught:
            ARGUMENTS[argument](tmp_path, value)
        assert isinstance(caught.value, deepnvme.Error), (value, caught.value)
        assert len(str(caught.value)) < 700
    # Not of the range everywhere, but never an error of another kind.
    for value in (-1, 1 << 63, (1 << 63) - 1):
        # No such memory, or no such checkpoint.
        with contextlib.suppress(ValueError, OSError, MemoryError):
            ARGUMENTS[argument](tmp_path, value)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_non_integers_are_named(tmp_path: Path, argument: str) -> None:
    for value in NOT_WHOLE:
        if value is True and argument in AS_INTEGERS:
            continue  # as in DeepSpeed's own ops
        error = ValueError if argument in SIZES and value == "x" else TypeError
        with pytest.raises(error, match=word(argument)):
            ARGUMENTS[argument](tmp_path, value)


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    assert deepnvme.write(b"abcd", tmp_path / "file", offset=np.int64(4)) == 4
    assert (tmp_path / "file").stat().st_size == 8
    checkpointer(tmp_path, lambda opened: opened.save(np.int32(5), {"a": 1}), keep=np.uint8(2))
    assert deepnvme.Checkpointer(tmp_path / "run").checkpoints[0].step == 5
    swapper(tmp_path, memory=np.int64(1 << 20)).close()
    with pytest.raises(InvalidArgumentError, match="keep"):
        checkpointer(tmp_path, keep=np.int64(0))
