"""The weights of a model folder, one after the other, in bounded memory."""

from __future__ import annotations

import os
import random
import shutil
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import save_file

import deepnvme
from deepnvme._checkpoint import iterate
from deepnvme._checkpoint.iterate import split_chunks
from deepnvme._checkpoint.load_request import TensorEntry
from deepnvme.errors import CorruptFileError
from deepnvme.integrations.weights import iterate_weights
from process_memory import PROCESS_MEMORY

from . import models

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("ahead", [1, 40_000, "1MB", "1GiB"])
def test_every_tensor_comes_once_and_as_it_was(tmp_path: Path, ahead: int | str) -> None:
    written = models.write_shards(tmp_path / "model", 5)
    seen: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_weights(tmp_path / "model", prefetch_bytes=ahead):
        assert name not in seen
        seen[name] = tensor
    assert seen.keys() == written.keys()
    assert all(models.same(seen[name], tensor) for name, tensor in written.items())
    # They are the caller's own, not views of a file.
    seen["model.layers.0.part1.weight"].zero_()
    again = dict(iterate_weights(tmp_path / "model"))
    assert models.same(again["model.layers.0.part1.weight"], written["model.layers.0.part1.weight"])


def test_files_come_in_the_order_given_and_tensors_in_that_of_the_file(tmp_path: Path) -> None:
    models.write_shards(tmp_path / "model", 3)
    files = sorted((tmp_path / "model").glob("*.safetensors"), reverse=True)
    names = [name for name, _ in iterate_weights(files, prefetch_bytes=9_000)]
    assert [name.split(".")[2] for name in names] == sorted((name.split(".")[2] for name in names), reverse=True)


def test_a_path_may_be_bytes_and_a_stripe_set(tmp_path: Path) -> None:
    written = models.write_shards(tmp_path / "model", 2)
    assert dict(iterate_weights(os.fsencode(tmp_path / "model"))).keys() == written.keys()
    parts = deepnvme.StripeSet([tmp_path / f"{number}.safetensors" for number in range(2)], stripe_bytes=4096)
    deepnvme.save(written, parts)
    assert all(models.same(written[name], tensor) for name, tensor in iterate_weights(parts))


def test_an_index_says_which_file_has_a_tensor(tmp_path: Path) -> None:
    written = models.write_shards(tmp_path / "model", 2)
    # A leftover of an earlier model, and a tensor that the index lists in another file.
    save_file({"old": torch.ones(3)}, tmp_path / "model" / "old.safetensors")
    assert dict(iterate_weights(tmp_path / "model")).keys() == written.keys()


def test_unwanted_tensors_are_not_read(tmp_path: Path) -> None:
    written = models.write_shards(tmp_path / "model", 4, rows=30_000)
    before = deepnvme.stats().bytes_read
    seen = dict(iterate_weights(tmp_path / "model", wanted=lambda name: ".layers.2." in name))
    read = deepnvme.stats().bytes_read - before
    assert seen.keys() == {name for name in written if ".layers.2." in name}
    total = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert read < total / 2


@pytest.mark.parametrize("cut_bytes", [1, 5000, 400_000])
def test_a_truncated_shard_is_reported_before_the_first_tensor(tmp_path: Path, cut_bytes: int) -> None:
    models.write_shards(tmp_path / "model", 3, rows=2000)
    victim = tmp_path / "model" / "model-00003-of-00003.safetensors"
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - cut_bytes)
    with pytest.raises(CorruptFileError, match="model-00003-of-00003"):
        iterate_weights(tmp_path / "model")


def test_a_shard_that_shrinks_on_the_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    models.write_shards(tmp_path / "model", 6, rows=4000)
    iterator = iterate_weights(tmp_path / "model", prefetch_bytes="100KB")
    next(iterator)
    victim = tmp_path / "model" / "model-00005-of-00006.safetensors"
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size // 2)
    with pytest.raises(OSError, match="model-00005-of-00006"):
        list(iterator)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    models.write_shards(tmp_path / "model", 3)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        iterate_weights(tmp_path / "model")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="deepnvme convert"):
        iterate_weights([tmp_path / "model.pt"])


def test_leaving_early_leaves_nothing_behind(tmp_path: Path) -> None:
    models.write_shards(tmp_path / "model", 6, rows=4000)
    iterator: Any = iterate_weights(tmp_path / "model", prefetch_bytes="1MB")
    next(iterator)
    iterator.close()
    shutil.rmtree(tmp_path / "model")
    written = models.write_shards(tmp_path / "model", 1, seed=12)
    assert dict(iterate_weights(tmp_path / "model")).keys() == written.keys()


@pytest.mark.parametrize("seed", range(20))
def test_chunks_have_every_tensor_once_and_keep_the_bound(seed: int) -> None:
    chooser = random.Random(seed)
    sizes = [chooser.choice([0, 1, 7, 100, 5000]) for _ in range(chooser.randrange(60))]
    limit = chooser.choice([1, 100, 101, 7000])
    entries = [TensorEntry(str(index), "uint8", [size], [1], 0, index) for index, size in enumerate(sizes)]
    chunks = list(split_chunks(entries, sizes, limit))
    assert [entry for chunk in chunks for entry in chunk.tensors] == entries
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        assert chunk.nbytes == sum(sizes[entry.storage] for entry in chunk.tensors)
        assert chunk.nbytes <= limit or len([entry for entry in chunk.tensors if sizes[entry.storage]]) == 1
        if following is not None:
            assert chunk.nbytes + sizes[following.tensors[0].storage] > limit


@pytest.mark.parametrize("is_slow", [True, False])
def test_no_more_is_started_than_the_bound_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    """A caller slower than the disk gets the full read-ahead that it allowed."""
    models.write_shards(tmp_path / "model", 6, rows=4000)
    monkeypatch.setattr(iterate, "_IN_FLIGHT_BYTES_MIN", 1 << 20)
    held = peak = 0

    class Watched(iterate._ChunkRead):
        def __init__(self, reader: Any, chunk: Any, block: Any) -> None:
            nonlocal held, peak
            held += chunk.nbytes
            peak = max(peak, held)
            super().__init__(reader, chunk, block)

        def finish(self, verify: str) -> Any:
            nonlocal held
            yield from super().finish(verify)
            held -= self.chunk.nbytes

    monkeypatch.setattr(iterate, "_ChunkRead", Watched)
    for _ in iterate_weights(tmp_path / "model", prefetch_bytes="4MiB"):
        if is_slow:
            time.sleep(0.02)
    assert held == 0
    assert peak <= 4 << 20
    assert peak > 5 << 19 or not is_slow


def test_memory_is_used_again_and_kept_tensors_stay_as_they_are(tmp_path: Path) -> None:
    written = models.write_shards(tmp_path / "model", 6, rows=4000)
    chooser, kept, places = random.Random(7), {}, set()
    for name, tensor in iterate_weights(tmp_path / "model", prefetch_bytes="2MB"):
        places.add(tensor.data_ptr())
        if chooser.random() < 0.2:
            kept[name] = tensor
        else:
            tensor.zero_()
    assert kept
    assert len(places) < len(written), "memory is used again"
    assert all(models.same(tensor, written[name]) for name, tensor in kept.items())


def test_memory_in_use_is_a_part_of_the_model(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for shard in range(4):
        state = {f"{shard}.{index}": torch.randn(2 << 20) for index in range(8)}
        save_file(state, tmp_path / f"{shard}.safetensors")
    program = PROCESS_MEMORY + textwrap.dedent(f"""
        import glob, torch
        from deepnvme.integrations.weights import iterate_weights
        files = sorted(glob.glob({str(tmp_path)!r} + "/*.safetensors"))
        for name, tensor in iterate_weights(files[:1], prefetch_bytes="16MB", wanted=lambda name: name == "0.0"):
            pass
        before = restart_peak()
        total = 0
        for name, tensor in iterate_weights(files, prefetch_bytes="32MB"):
            total += tensor.nbytes
        print(total, memory_bytes("VmHWM") - before)
    """)
    told = python(program)
    total, grown = map(int, told.stdout.split())
    assert total == 256 << 20
    # The read-ahead, a tensor, and rounding to huge pages.
    assert grown < 96 << 20
