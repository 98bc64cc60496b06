"""``deepnvme stream-bench``: measure streaming against the limits of disk and CPU, with a model of random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.save import save
from deepnvme._stream.streaming import stream
from deepnvme._utils.public import parse_bytes, whole
from deepnvme._utils.terminal import say
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepnvme._stream.streaming import Streaming

# The least default memory, in eighths of the largest layer. Other weights stay in memory as well.
_LAYER_SHARE = 10
# Of the generated models.
_VOCABULARY = 32_000
# Hidden size, feed-forward width, heads and key-value heads of Llama models with 1, 7, 13 and 70 billion parameters.
_SHAPES = ((2048, 5632, 32, 4), (4096, 11008, 32, 32), (5120, 13824, 40, 40), (8192, 28672, 64, 8))
# A shape with fewer layers than this is too large, and a smaller one is used. The smallest shape has at least two
# layers.
_LAYERS_MIN = 8


def run(options: dict[str, Any]) -> int:
    """Run the benchmark with its options. Returns the exit status."""
    import transformers  # noqa: PLC0415

    model_bytes = parse_bytes(options["model_size"], "--model-size")
    if model_bytes < smallest_bytes():
        raise InvalidArgumentError(
            f"--model-size is {options['model_size']}; it must be at least {smallest_bytes() / 1e6:.0f}MB, the "
            "smallest model of this kind"
        )
    for name in ("prompt_tokens", "new_tokens"):
        whole(options[name], f"--{name.replace('_', '-')}", 1)
    for batch in options["batch"]:
        whole(batch, "--batch", 1)
    given = parse_bytes(options["memory"], "--memory") if options["memory"] else None
    parent = Path(options["folder"])
    if not parent.is_dir():
        raise InvalidArgumentError(f"{parent} is not a folder; name an existing folder for the temporary model")
    free = shutil.disk_usage(parent).free
    # The packed model and its source exist at the same time for a while.
    needed = model_bytes * (2 if options["pack"] else 1)
    if free < needed * 1.05:
        raise InvalidArgumentError(f"{parent} has {free:,} bytes free, and the model needs {needed:,}")
    with tempfile.TemporaryDirectory(dir=parent, prefix=".deepnvme-stream-bench-") as name:
        folder = Path(name, "model")
        made = make_llama(folder, model_bytes)
        if options["pack"]:
            folder = _packed(folder, options["pack"])
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        memory = given or default_memory(model_bytes, options["dtype"], config)
        model = stream(folder, memory=memory, device=options["device"], dtype=options["dtype"])
        rows = []
        for batch in options["batch"] or [1, 4, 16]:
            ids = torch.randint(0, model.config.vocab_size, (batch, options["prompt_tokens"]), device=model.device)
            rows.append(_measure(model, ids, options["new_tokens"]))
            if not options["json"]:
                _print_row(rows[-1], is_first=len(rows) == 1)
        best = max(rows, key=lambda row: row["new_tokens_per_s"])
        answer = {
            "model_bytes": made,
            "file_bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "memory_bytes": memory,
            "dtype": str(model.dtype).removeprefix("torch."),
            "rows": rows,
            "best_batch": best["batch"],
        }
        if options["json"]:
            say(json.dumps(answer, indent=2))
        model.streaming.close()
    return 0


def default_memory(model_bytes: int, dtype: str, config: Any) -> int:
    """Choose the default memory for weights: a quarter of the whole model, and enough for its largest layer.

    Args:
        model_bytes: bytes of the model as generated, with two bytes for each weight.
        dtype: the dtype to compute with; ``"auto"`` means the one of the config.
        config: the config of the measured model. Packing may have changed its dtype.
    """
    computed = str(config.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    nbytes = 4 if computed == "float32" else 2
    # The largest layer is that of the vocabulary.
    largest = int(config.vocab_size * config.hidden_size) * nbytes
    return max(model_bytes * nbytes // 8, largest * _LAYER_SHARE // 8)


@dataclass(frozen=True)
class Roofline:
    """Disk time and compute time of one step, in seconds."""

    disk_s: float
    compute_s: float
    bytes_read: int

    @property
    def seconds(self) -> float:
        """The longer of the two durations."""
        return max(self.disk_s, self.compute_s)


def measure(streaming: Streaming, step: Callable[[], object], rounds: int = 3) -> Roofline:
    """Measure disk and CPU separately, in alternating rounds.

    Args:
        streaming: the model's streaming.
        step: calls the model once.
        rounds: repetitions; the result is the median.
    """
    disk, compute, read = [], [], 0
    fetch_all(streaming)
    for _ in range(rounds):
        before = streaming.counters().get("bytes_read", 0)
        began = time.perf_counter()
        fetch_all(streaming)
        disk.append(time.perf_counter() - began)
        read = int(streaming.counters().get("bytes_read", 0) - before)
        with without_disk(streaming):
            began = time.perf_counter()
            step()
            compute.append(time.perf_counter() - began)
    middle = rounds // 2
    return Roofline(sorted(disk)[middle], sorted(compute)[middle], read)


def fetch_all(streaming: Streaming) -> None:
    """Load each layer in turn without computing."""
    layer_cache = streaming.layer_cache
    if layer_cache is not None:
        layer_cache.fetch_all()


@contextmanager
def without_disk(streaming: Streaming) -> Iterator[None]:
    """Compute with the bytes that happen to be in the slots: the speed is right, the results are not."""
    layer_cache = streaming.layer_cache
    if layer_cache is None:
        yield
        return
    with layer_cache.without_disk():
        yield


def smallest_bytes(dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the smallest model that :func:`make_llama` makes."""
    layer, ends = _layer_and_ends(_SHAPES[0], dtype)
    return ends + 2 * layer


def make_llama(folder: Path, nbytes: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write a Llama-shaped model of random weights, layer by layer, so that it is never in memory as a whole.

    Args:
        folder: receives ``config.json`` and safetensors files with an index.
        nbytes: approximate bytes of weights.
        dtype: of the weights.

    Returns:
        Bytes of weights.
    """
    import transformers  # noqa: PLC0415

    for shape in reversed(_SHAPES):
        layer, ends = _layer_and_ends(shape, dtype)
        layers = round((nbytes - ends) / layer)
        if layers >= _LAYERS_MIN or shape == _SHAPES[0]:
            break
    hidden, wide, heads, kv_heads = shape
    layers = max(layers, 2)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        dtype=str(dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    empty.config.architectures = ["LlamaForCausalLM"]
    empty.config.save_pretrained(folder)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in empty.state_dict().items():
        block = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        parts.setdefault(block, {})[name] = tensor.shape
    generator = torch.Generator().manual_seed(0)
    weight_map, total = {}, 0
    for number, shapes in enumerate(parts.values(), start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        state = {
            name: torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        save(state, folder / file)
        weight_map.update(dict.fromkeys(state, file))
        total += sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _packed(folder: Path, dtype: str) -> Path:
    """Pack the model with ``deepnvme pack`` and remove the source."""
    target = folder.with_name("packed")
    command = [sys.executable, "-m", "deepnvme", "pack", str(folder), str(target), "--dtype", dtype]
    # Its output is not part of this command's result.
    done = subprocess.run(command, stdout=sys.stderr or subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise OSError(f"deepnvme pack --dtype {dtype} failed with exit status {done.returncode}")
    shutil.rmtree(folder)
    return target


def _measure(model: Any, ids: Any, new_tokens: int) -> dict[str, float]:
    """Measure one batch: the prompt, then tokens, then the two limits with the same layers."""
    streaming = model.streaming
    with torch.inference_mode():
        streaming.steps.last.clear()
        began = time.perf_counter()
        model.generate(ids, min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - began
        prompt, *steps = streaming.steps.last
        past = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        limit = measure(streaming, lambda: model(ids[:, -1:], past_key_values=past, use_cache=True))
    middle = sorted(step.seconds for step in steps)[len(steps) // 2] if steps else prompt.seconds
    return {
        "batch": ids.shape[0],
        "prompt_s": prompt.seconds,
        "step_s": middle,
        "seconds": seconds,
        "new_tokens_per_s": ids.shape[0] * new_tokens / seconds,
        "decode_tokens_per_s": ids.shape[0] / middle,
        "step_bytes": limit.bytes_read,
        "disk_s": limit.disk_s,
        "compute_s": limit.compute_s,
        "roofline_s": limit.seconds,
        "roofline_fraction": limit.seconds / middle,
    }


def _print_row(row: dict[str, float], *, is_first: bool) -> None:
    if is_first:
        say("batch  prompt s  step s  disk alone  compute alone  of roofline  tokens/s decoding  tokens/s in all")
    say(
        f"{row['batch']:5d}  {row['prompt_s']:8.2f}  {row['step_s']:6.3f}  {row['disk_s']:10.3f}  "
        f"{row['compute_s']:13.3f}  "
        f"{row['roofline_fraction']:11.0%}  {row['decode_tokens_per_s']:17.2f}  {row['new_tokens_per_s']:15.2f}"
    )


def _layer_and_ends(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a layer, and those of the weights outside of layers."""
    hidden, wide, heads, kv_heads = shape
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads * kv_heads)
    layer = attention + 3 * hidden * wide + 2 * hidden
    return dtype.itemsize * layer, dtype.itemsize * (2 * _VOCABULARY * hidden + hidden)
