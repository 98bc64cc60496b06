"""A fault in the middle of a generation ends it with a clear error."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

from . import plain_module
from .small_models import SmallModels, tokens, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_grad")


def assert_right(saved: plain_module.Saved, model: Any) -> None:
    assert torch.equal(model(saved.question), saved.answer)


def in_the_middle(model: Any, strike: Callable[[], object]) -> None:
    """Run an action when half of the layers have run."""
    handle: list[Any] = []

    def hook(*_: object) -> None:
        handle.pop().remove()
        strike()

    handle.append(model.layers[plain_module.DEPTH // 2].register_forward_pre_hook(hook))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = plain_module.save(path.with_name("other.safetensors"), seed=1)
    other.path.rename(path)


def overwritten(path: Path) -> None:
    os.utime(path, ns=(1, 1))
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(os.urandom(1000))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncated, "it had [0-9]+ bytes and has [0-9]+"),
        (replaced, "another file has its name"),
        (overwritten, "it was written to"),
    ],
)
def test_a_file_that_changes_under_the_model(
    saved: plain_module.Saved, change: Callable[[Path], None], words: str
) -> None:
    model = saved.stream()
    assert_right(saved, model)
    content = saved.path.read_bytes()
    in_the_middle(model, lambda: change(saved.path))
    for _ in range(3):
        with pytest.raises(deepnvme.errors.ChangedFileError, match=words) as caught:
            model(saved.question)
        assert caught.value.filename == str(saved.path)
    assert "open the model again" in str(caught.value)
    # The process continues: the restored file streams again once it is reopened.
    model.streaming.close()
    saved.path.write_bytes(content)
    again = saved.stream()
    assert_right(saved, again)
    again.streaming.close()


def test_a_file_that_is_deleted_under_the_model(saved: plain_module.Saved) -> None:
    model = saved.stream()
    in_the_middle(model, saved.path.unlink)
    with pytest.raises(deepnvme.errors.NotFoundError) as caught:
        model(saved.question)
    assert caught.value.filename == str(saved.path)
    model.streaming.close()


def first_broken(path: Path, image: Path) -> None:
    """Truncate the disk until the end of a file cannot be read."""
    import mmap

    page = mmap.mmap(-1, 4096)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    last = (path.stat().st_size - 1) // 4096 * 4096
    try:
        for size in range((32 << 20) - 65536, 0, -65536):
            os.truncate(image, size)
            try:
                os.preadv(descriptor, [page], last)
            except OSError:
                return
    finally:
        os.close(descriptor)
    pytest.skip("a disk that was cut is still whole here")


def test_a_disk_that_breaks(file_systems: Any) -> None:
    folder, image = file_systems.mount("ext4", 32), file_systems.image
    saved = plain_module.save(folder / "weights.safetensors")
    os.sync()
    model = saved.stream()
    assert_right(saved, model)
    whole = image.read_bytes()
    in_the_middle(model, lambda: first_broken(saved.path, image))
    with pytest.raises(deepnvme.Error) as caught:
        for _ in range(3):
            model(saved.question)
    assert caught.value.filename == str(saved.path)
    assert caught.value.errno == errno.EIO
    with image.open("r+b") as file:
        file.write(whole)
    # A layer that was being loaded reports its failure once.
    for _ in range(2 * plain_module.DEPTH):
        try:
            assert_right(saved, model)
            break
        except deepnvme.Error:
            continue
    assert_right(saved, model)
    model.streaming.close()
    # An open file would prevent the file system from being unmounted.
    del caught, model
    gc.collect()


def test_ctrl_c_in_the_middle(saved: plain_module.Saved) -> None:
    """Nothing that was held is lost at any moment, although there is one slot only."""
    model = saved.stream(memory=90_000)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.default_int_handler(signal.SIGINT, None))
    interrupted = 0
    try:
        for attempt in range(150):
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00004 * attempt)
            try:
                for _ in range(50):
                    model(saved.question)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if attempt % 10 == 0:
                assert_right(saved, model)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    assert_right(saved, model)
    model.streaming.close()


@pytest.mark.parametrize("name", ["llama_midsize", "mixtral_midsize"])
def test_a_file_that_is_cut_off_ends_the_generation(models: SmallModels, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.folder(name), folder)
    question, options = tokens(2, 5), {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = models.model(name).generate(question, **options)
    model = deepnvme.stream(folder, memory=weights_bytes(folder) // 2)
    assert torch.equal(model.generate(question, **options), expected)
    weights = next(folder.glob("*.safetensors"))
    content, steps = weights.read_bytes(), []

    def hook(*_: object) -> None:
        steps.append(1)
        if len(steps) == 6:
            truncated(weights)

    handle = model.register_forward_pre_hook(hook)
    with pytest.raises(deepnvme.errors.ChangedFileError, match=r"it had [0-9]+ bytes"):
        model.generate(question, **options)
    assert 6 <= len(steps) < 12, "in the middle of the generation"
    handle.remove()
    model.streaming.close()
    weights.write_bytes(content)
    again = deepnvme.stream(folder, memory=weights_bytes(folder) // 2)
    assert torch.equal(again.generate(question, **options), expected)
    again.streaming.close()
