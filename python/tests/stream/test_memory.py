"""Memory stays within its limit and is returned."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from process_memory import PROCESS_MEMORY

from . import plain_module
from .small_models import SmallModels, tokens, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_grad")

# Memory beyond the limit: activations, torch's allocator caches, threads and their stacks.
CONSTANT = 40 << 20
MEMORY = 32 << 20
# If weights are converted on load: docs/explanation/memory-models.md.
BUFFERS = (min(max(len(os.sched_getaffinity(0)) // 2, 1), 8) + 1) << 24

CHILD = f"""
{PROCESS_MEMORY}
import os, resource, sys
import torch, transformers, deepnvme
torch.set_num_threads(1)

folder, options, memory = {{folder!r}}, {{options!r}}, {{memory}}
tokens = torch.randint(3, 8000, (2, 16))
# Late imports, and pages of libraries that a fork touches for the first time, do not count as the model's memory.
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
tiny = transformers.LlamaConfig(**sizes)
transformers.LlamaForCausalLM(tiny).generate(tokens[:, :2] % 8, min_new_tokens=2, max_new_tokens=2, do_sample=False)
deepnvme.default_engine()
before = restart_peak()
# Memory that is requested and never touched counts as well: thread stacks, and buffers of products on some CPUs.
limit = memory_bytes("VmData") + memory + {CONSTANT} + {BUFFERS} + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
model = deepnvme.stream(folder, memory=memory, **options)
assert model.streaming.model_bytes > 5 * memory, model.streaming.model_bytes
model.generate(tokens, min_new_tokens=4, max_new_tokens=4, do_sample=False)
files = sum(os.stat(os.path.join(folder, name)).st_size for name in os.listdir(folder))
# Of what is fewer bytes on disk, some stays in memory.
assert model.streaming.stats().bytes_read > 3 * (files - 2 * memory), model.streaming.stats()
buffers = model.streaming.layer_cache._streamer.conversion_bytes_max
assert buffers <= {BUFFERS}, buffers
peak = memory_bytes("VmHWM") - before
print("peak", peak >> 20, "MiB, of them buffers", buffers >> 20)
assert peak < memory + {CONSTANT} + buffers, f"{{{{peak:,}}}} bytes"
model.streaming.close()
del model
try:
    transformers.LlamaForCausalLM.from_pretrained({{original!r}}, dtype=torch.float32)
except (RuntimeError, MemoryError):
    print("in memory, it does not fit")
else:
    raise SystemExit("the limit limits nothing")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model of about 200 MB without initialising one."""
    folder = tmp_path_factory.mktemp("large")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "vocab_size": 8000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    state = {name: torch.empty(each.shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03) for name, each in shapes.items()}
    deepnvme.save(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("packed", "options", "memory"),
    [
        (None, {}, MEMORY),
        (None, {"dtype": "float32"}, 2 * MEMORY),
        # The output layer in float32 needs nearly all of it, so others use its slot in turns.
        (None, {"dtype": "float32"}, MEMORY + (4 << 20)),
        ("lossless", {}, MEMORY),
        ("int8", {"dtype": "float32"}, 2 * MEMORY),
    ],
)
def test_a_model_larger_than_the_memory_that_a_process_may_have(
    large: Path, python_fork: Callable[..., Any], packed: str | None, options: dict[str, str], memory: int
) -> None:
    folder = large
    if packed:
        folder = large.with_name(f"packed-{packed}")
        subprocess.run([sys.executable, "-m", "deepnvme", "pack", large, folder, "--dtype", packed], check=True)
    ended = python_fork(CHILD.format(folder=str(folder), original=str(large), options=options, memory=memory))
    assert "it does not fit" in ended.stdout


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (this counts its own, each time)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("is_closed", [True, False])
def test_models_come_and_go_without_leaks(models: SmallModels, is_closed: bool) -> None:
    folder = models.folder("llama_midsize")
    memory = weights_bytes(folder) // 2

    def once() -> None:
        model = deepnvme.stream(folder, memory=memory)
        model(tokens(1, 8))
        if is_closed:
            model.streaming.close()
        del model
        gc.collect()

    for _ in range(2):
        once()
    before = descriptors(), threads()
    bytes_before = resident()
    for _ in range(8):
        once()
    assert descriptors() == before[0]
    deadline = time.monotonic() + 10  # a thread is listed a little longer than it runs
    while threads() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before[1], "engines of other tests may have ended meanwhile"
    # A leak of one model's memory each time would add up to eight times as much.
    assert resident() - bytes_before < 3 * memory


def test_a_model_that_is_dropped_in_the_middle_of_its_reading_ahead(tmp_path: Path) -> None:
    saved = plain_module.save(tmp_path / "weights.safetensors")
    before = descriptors()
    for _ in range(5):
        model = saved.stream()
        memory = weakref.ref(model.streaming.layer_cache)
        model.layers[0](torch.zeros(1, plain_module.WIDTH))
        del model
        gc.collect()
        assert memory() is None, "something outside the model still has it"
    assert descriptors() <= before + 1


def test_closing_gives_memory_back_while_the_model_lives(tmp_path: Path) -> None:
    saved = plain_module.save(tmp_path / "weights.safetensors")
    model = saved.stream()
    model(saved.question)
    memory = weakref.ref(model.streaming.layer_cache._memory)
    before = descriptors()
    model.streaming.close()
    gc.collect()
    assert memory() is None
    assert descriptors() < before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())
