"""x."""

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

from deepnvme._utils.arguments import parse_bytes
from deepnvme._utils.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepnvme._stream.streaming import Streaming


def run(options: dict[str, Any]) -> int:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from deepnvme._stream.streaming import stream  # noqa: PLC0415
    from deepnvme._stream.synthetic_models import make_llama  # noqa: PLC0415

    model_bytes = parse_bytes(options["model_size"], "--model-size")
    given = parse_bytes(options["memory"], "--memory") if options["memory"] else None
    parent = Path(options["folder"])
    if not parent.is_dir():
        raise ValueError(f"{parent} is not a folder; the model is made for a while in one that is there")
    free = shutil.disk_usage(parent).free
    # What is packed stands beside what it was made of for a while.
    needed = model_bytes * (2 if options["pack"] else 1)
    if free < needed * 1.05:
        raise ValueError(f"{parent} has {free:,} bytes free, and the model needs {needed:,}")
    with tempfile.TemporaryDirectory(dir=parent, prefix=".deepnvme-stream-bench-") as name:
        folder = Path(name, "model")
        made = make_llama(folder, model_bytes)
        if options["pack"]:
            folder = _packed(folder, options["pack"])
        memory = given or default_memory(model_bytes, options["dtype"], transformers.AutoConfig.from_pretrained(folder))
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
    """Say how much memory the weights get where nobody said it: a quarter of what the whole model would have there.

    Args:
        model_bytes: of the model as it is made, with two bytes for each weight.
        dtype: that it is computed with; ``"auto"`` is that of the config.
        config: of the model as it is measured, after packing, which may have changed its dtype.
    """
    computed = str(config.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    return model_bytes * (2 if computed == "float32" else 1) // 4


def _packed(folder: Path, dtype: str) -> Path:
    """Have the model packed by the command for that, and its first form removed."""
    target = folder.with_name("packed")
    command = [sys.executable, "-m", "deepnvme", "pack", str(folder), str(target), "--dtype", dtype]
    # Its answer is no part of this one.
    done = subprocess.run(command, stdout=sys.stderr or subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise OSError(f"deepnvme pack --dtype {dtype} ended with {done.returncode}")
    shutil.rmtree(folder)
    return target


def _measure(model: Any, ids: Any, new_tokens: int) -> dict[str, float]:
    """Measure one batch: prompt, then tokens, then the two limits over the same layers."""
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
    """Seconds of one step."""

    disk_s: float
    compute_s: float
    bytes_read: int

    @property
    def seconds(self) -> float:
        """What the slower of the two needs."""
        return max(self.disk_s, self.compute_s)


def measure(streaming: Streaming, step: Callable[[], object], rounds: int = 3) -> Roofline:
    """Measure disk and processor, each by itself, in alternating rounds.

    Args:
        streaming: of the model.
        step: calls the model once.
        rounds: how often; medians count.
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
    """Call for each layer in turn, and compute nothing."""
    if streaming.layer_cache is not None:
        streaming.layer_cache.fetch_all()


@contextmanager
def without_disk(streaming: Streaming) -> Iterator[None]:
    """Have layers compute with whatever is in the slots: as fast as with their own weights, and wrong."""
    if streaming.layer_cache is None:
        yield
        return
    with streaming.layer_cache.without_disk():
        yield
