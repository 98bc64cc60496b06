"""``deepnvme stream-bench``: measure streaming against the limits of disk and CPU."""

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

from deepnvme._utils.arguments import parse_bytes, whole
from deepnvme._utils.terminal import say
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepnvme._stream.streaming import Streaming


# The least default memory, in eighths of the largest layer. Other weights stay in memory as well.
_LAYER_SHARE = 10


def run(options: dict[str, Any]) -> int:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from deepnvme._stream.cli.synthetic_models import make_llama, smallest_bytes  # noqa: PLC0415
    from deepnvme._stream.streaming import stream  # noqa: PLC0415

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
    import torch  # noqa: PLC0415

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
        "of_roofline": limit.seconds / middle,
    }


def _print_row(row: dict[str, float], *, is_first: bool) -> None:
    if is_first:
        say("batch  prompt s  step s  disk alone  compute alone  of roofline  tokens/s decoding  tokens/s in all")
    say(
        f"{row['batch']:5d}  {row['prompt_s']:8.2f}  {row['step_s']:6.3f}  {row['disk_s']:10.3f}  "
        f"{row['compute_s']:13.3f}  "
        f"{row['of_roofline']:11.0%}  {row['decode_tokens_per_s']:17.2f}  {row['new_tokens_per_s']:15.2f}"
    )


@dataclass(frozen=True)
class Roofline:
    """Disk time and compute time of one step, in seconds."""

    disk_s: float
    compute_s: float
    bytes_read: int

    @property
    def seconds(self) -> float:
        """Seconds that the slower of the two needs."""
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
        before = streaming.counters()["bytes_read"]
        began = time.perf_counter()
        fetch_all(streaming)
        disk.append(time.perf_counter() - began)
        read = int(streaming.counters()["bytes_read"] - before)
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
