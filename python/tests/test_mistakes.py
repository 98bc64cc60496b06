"""A newcomer's mistakes: each answer names the argument and the remedy."""

from __future__ import annotations

import copy
import fractions
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme
from deepnvme.errors import InvalidArgumentError, NotFolderError, NotFoundError

torch = pytest.importorskip("torch")


def file_for_folder(folder: Path) -> object:
    (folder / "model.pt").write_bytes(b"x")
    return deepnvme.Checkpointer(folder / "model.pt").save(1, {})


def borrowed(folder: Path) -> object:
    with deepnvme.Swapper(folder, memory="1MB") as swapper:
        swapper.put("a", torch.ones(3))
        return swapper.borrow("a").add_(1)


def overlapped(folder: Path) -> object:
    with deepnvme.Checkpointer(folder).overlap(torch.nn.Linear(2, 2)):
        return None


def settings_of(folder: Path, **options: Any) -> object:
    (folder / "deepnvme.toml").write_text("[engine]\nqueue_depth = 8\n", encoding="ascii")
    return deepnvme.Engine.from_file(folder / "deepnvme.toml", **options)


def swapped(folder: Path, act: Callable[[deepnvme.Swapper], object]) -> object:
    with deepnvme.Swapper(folder, memory="1MB") as swapper:
        return act(swapper)


def waited(folder: Path, timeout: Any) -> object:
    with deepnvme.start_write(torch.ones(3), folder / "x") as transfer:
        return transfer.result(timeout)


Call = Callable[[Path], Any]
MISTAKES: dict[str, tuple[Call, type[Exception], str]] = {
    "unknown direction": (
        lambda folder: deepnvme.bench("reads", folder),  # type: ignore[arg-type]
        InvalidArgumentError,
        "direction is 'reads'; it must be 'read' or 'write'",
    ),
    "number out of range": (
        lambda folder: deepnvme.bench("read", folder, loops=0),
        InvalidArgumentError,
        "loops is 0; it must be between 1 and 1000",
    ),
    "bench without a folder": (
        lambda _: deepnvme.bench("read"),
        TypeError,
        'deepnvme.bench needs at least one folder: deepnvme.bench("read", "/mnt/nvme")',
    ),
    "tune without a folder": (
        lambda _: deepnvme.tune(),
        TypeError,
        'deepnvme.tune needs at least one folder: deepnvme.tune("/mnt/nvme")',
    ),
    "state before step": (
        lambda folder: deepnvme.Checkpointer(folder).save({"a": torch.ones(3)}, 1),  # type: ignore[arg-type]
        TypeError,
        "step is a dict; the step comes first: save(step, state)",
    ),
    "file for a folder": (file_for_folder, NotFolderError, "make folder: Not a directory"),
    "model for an optimizer": (overlapped, TypeError, "overlap takes optimizers of torch, not Linear"),
    "borrow without a block": (borrowed, AttributeError, "in a block: with swapper.borrow('a') as tensor:"),
    "tensor before path": (
        lambda folder: deepnvme.read_batch([(torch.ones(3), folder / "x", 0)]),  # type: ignore[list-item]
        TypeError,
        "item 0: an item is a tuple (path, offset, tensor); the first element is a tensor",
    ),
    "one path for several": (
        lambda folder: deepnvme.StripeSet(str(folder / "abc")),
        TypeError,
        "paths is one path; it must be a list of them",
    ),
    "clipping to less than nothing": (
        lambda _: deepnvme.optim.AdamW([torch.nn.Parameter(torch.ones(3))], max_norm=-1),
        InvalidArgumentError,
        "max_norm is -1; it must be at least 0",
    ),
    "little memory": (
        lambda folder: deepnvme.Swapper(folder, memory="1KB"),
        InvalidArgumentError,
        "memory is 1000 bytes; it must be at least",
    ),
    "shards of an archive": (
        lambda folder: deepnvme.save({}, folder / "x.pt", max_shard_bytes="1MB"),
        InvalidArgumentError,
        "max_shard_bytes splits safetensors files only",
    ),
    "metadata of an archive": (
        lambda folder: deepnvme.save({}, folder / "x.pt", metadata={"a": "b"}),
        InvalidArgumentError,
        "metadata belongs to safetensors; for a .pt file, put it into the dict that you save",
    ),
    "a flag for a word": (
        lambda folder: deepnvme.write(torch.ones(3), folder / "x", durability=True),  # type: ignore[arg-type]
        TypeError,
        "durability is True; it must be 'none', 'data' or 'full'",
    ),
    "a flag for a word of open": (
        lambda folder: deepnvme.open(folder / "x", "wb", durability=True),  # type: ignore[call-overload]
        TypeError,
        "durability is True; it must be 'none', 'data' or 'full'",
    ),
    "an unknown word": (
        lambda folder: deepnvme.write_batch([(folder / "x", 0, torch.ones(3))], durability="all"),  # type: ignore[arg-type]
        InvalidArgumentError,
        "durability is 'all'; it must be 'none', 'data' or 'full'",
    ),
    "a number for a word": (
        lambda _: deepnvme.Engine(backend=1),  # type: ignore[arg-type]
        TypeError,
        "backend is 1; it must be 'auto', 'io_uring', 'aio' or 'threads'",
    ),
    "a number for a direction": (
        lambda folder: settings_of(folder, direction=1),
        TypeError,
        "direction is 1; it must be 'read' or 'write'",
    ),
    "a number for a flag": (
        lambda _: deepnvme.Engine(lock_pool=1),  # type: ignore[arg-type]
        TypeError,
        "lock_pool is 1; it must be True or False",
    ),
    "a number for a lane": (
        lambda _: deepnvme.span("a", 1, 2, 3),  # type: ignore[arg-type]
        TypeError,
        "lane is 1; it must be a str",
    ),
    "a fraction of a queue": (
        lambda _: deepnvme.Engine(queue_depth=1.5),  # type: ignore[arg-type]
        TypeError,
        "queue_depth is 1.5; it must be a whole number between 1 and 4096",
    ),
    "a fraction of a block": (
        lambda _: deepnvme.Engine(block_bytes=1.5),  # type: ignore[arg-type]
        TypeError,
        "or a number of bytes between 4096 and 67108864",
    ),
    "a fraction of a stripe": (
        lambda _: deepnvme.StripeSet(["a", "b"], stripe_bytes=1.5),  # type: ignore[arg-type]
        TypeError,
        "or a number of bytes between 4096 and 17592186044416",
    ),
    "a fraction of an offset": (
        lambda folder: deepnvme.read(torch.ones(3), folder / "x", 1.5),  # type: ignore[arg-type]
        TypeError,
        "offset is 1.5; it must be a whole number of at least 0",
    ),
    "a number for a key": (
        lambda folder: swapped(folder, lambda swapper: swapper.put(1, torch.ones(3))),  # type: ignore[arg-type]
        TypeError,
        "key is 1; it must be a str",
    ),
    "a number for keys": (
        lambda folder: swapped(folder, lambda swapper: swapper.flush(1)),  # type: ignore[arg-type]
        TypeError,
        "keys is 1; it must be a key or a list of keys",
    ),
    "a number for a repetition": (
        lambda folder: swapped(folder, lambda swapper: swapper.schedule(["a"], repeat=1)),  # type: ignore[arg-type]
        TypeError,
        "repeat is 1; it must be True or False",
    ),
    "a text for a number of a command": (
        lambda folder: deepnvme.bench("read", folder, loops="many"),  # type: ignore[arg-type]
        InvalidArgumentError,
        "invalid value 'many' for 'loops'",
    ),
    "a text for a timeout": (
        lambda folder: waited(folder, "1"),
        TypeError,
        "timeout is '1'; it must be seconds of at least 0, or None to wait forever",
    ),
    "a negative timeout": (
        lambda folder: waited(folder, -1),
        InvalidArgumentError,
        "timeout is -1; it must be seconds of at least 0",
    ),
    "a timeout that is no number": (
        lambda folder: waited(folder, float("nan")),
        InvalidArgumentError,
        "timeout is nan; it must be seconds of at least 0",
    ),
    "a stripe set for a folder": (
        lambda folder: deepnvme.Checkpointer(deepnvme.StripeSet([folder / "a", folder / "b"])),  # type: ignore[arg-type]
        TypeError,
        "it must be str, bytes or os.PathLike",
    ),
    "a stripe set for a timeline": (
        lambda folder: deepnvme.trace(deepnvme.StripeSet([folder / "a", folder / "b"])),  # type: ignore[arg-type]
        TypeError,
        "path must be str, bytes or os.PathLike, not StripeSet",
    ),
    "no settings": (
        lambda folder: deepnvme.Engine.from_file(folder / "deepnvme.toml"),
        NotFoundError,
        "make the file with `deepnvme tune`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_names_the_remedy(tmp_path: Path, name: str) -> None:
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=re.escape(text)):
        call(tmp_path)


def test_a_whole_module_is_answered_with_its_state_dict(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        deepnvme.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    assert any("save module.state_dict() instead" in str(warning.message) for warning in said)


def test_long_timeouts_wait(tmp_path: Path) -> None:
    for timeout in (0.0, 60, float("inf"), 1e300, 10**400, None):
        transfer = deepnvme.start_write(torch.ones(3), tmp_path / "x")
        transfer.result()
        assert transfer.result(timeout) == 12


def test_one_key_is_not_a_list_of_letters(tmp_path: Path) -> None:
    with deepnvme.Swapper(tmp_path, memory="1MB") as swapper:
        swapper.put("ab", torch.ones(3))
        swapper.prefetch("ab")
        swapper.schedule("ab")
        swapper.flush("ab")


@pytest.mark.parametrize("value", [np.ones(3), np.float32(1), np.arange(3), np.array(["a", "bc"])])
def test_the_advice_about_numpy_can_be_pasted(tmp_path: Path, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepnvme.save({"a": value}, tmp_path / "x.pt")
    try:
        with pytest.raises(deepnvme.errors.UnsafeFileError) as refused:
            deepnvme.load(tmp_path / "x.pt")
        exec(str(refused.value).partition("allow what it needs: ")[2], {})
        assert np.array_equal(deepnvme.load(tmp_path / "x.pt")["a"], value)
    finally:
        torch.serialization.clear_safe_globals()


def test_a_warning_asks_for_a_call_only_if_it_names_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Save plain values and tensors instead$"):
        deepnvme.save({"a": np.ones(3)}, tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="or make that call before loading$"):
        deepnvme.save({"a": fractions.Fraction(1)}, tmp_path / "x.pt")


def test_refused_operations_of_a_streamed_model_name_the_remedy(tmp_path: Path) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    deepnvme.save(module.state_dict(), tmp_path / "w.safetensors")
    model = deepnvme.stream(module, weights=tmp_path / "w.safetensors", memory="100kB")
    for act, text in (
        (model.half, "cast nor moved; pass dtype= or device= to deepnvme.stream"),
        (lambda: model.to("meta"), "cast nor moved"),
        (lambda: copy.deepcopy(model), "copied nor saved; copy its folder or file"),
        (lambda: torch.save(model.state_dict(), tmp_path / "x"), "copied nor saved"),
        (lambda: deepnvme.save(model.state_dict(), tmp_path / "x.safetensors"), "copied nor saved"),
        (lambda: torch.nn.functional.linear(torch.ones(64), model[2].weight), "stream with more memory"),
    ):
        with pytest.raises(RuntimeError, match=text):
            act()
    model.streaming.close()
