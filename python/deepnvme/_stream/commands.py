"""``deepnvme generate`` and ``deepnvme stream-bench``. What may be typed stands in Rust, with the other commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deepnvme._utils.arguments import parse_bytes
from deepnvme._utils.terminal import OutputError, is_terminal, say, show
from deepnvme.errors import Error

_PATHS = ("model", "prompt_file", "folder", "trace")


def run(name: str, options: str) -> int:
    """Run a command with its options as JSON; the exit status: 0 success, 1 failure, 2 usage error."""
    parsed = {name: _path(value) if name in _PATHS else value for name, value in json.loads(options).items()}
    try:
        return {"generate": _generate, "stream-bench": _stream_bench}[name](parsed)
    except BrokenPipeError:
        # Whoever reads it has read enough.
        return 0
    except OutputError as error:
        return _refused(str(error), 1)
    except ImportError as error:
        return _refused(f"{error}; install it: {sys.executable} -m pip install torch transformers", 1)
    except ValueError as error:
        return _refused(str(error), 2)
    except (Error, MemoryError, OSError) as error:
        return _refused(str(error), 1)


def _path(value: Any) -> Any:
    """Give a path back that is no UTF-8: JSON has its bytes then."""
    return os.fsdecode(bytes(value)) if isinstance(value, list) else value


def _refused(text: str, status: int) -> int:
    # A name in it may have been chosen to move the cursor, or to look like a line of ours.
    shown = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)
    show("deepnvme: " + shown.replace("\n", "\n  ") + "\n")
    return status


def _generate(options: dict[str, Any]) -> int:
    import transformers  # noqa: PLC0415

    from deepnvme._stream.streaming import stream  # noqa: PLC0415

    prompts = options["prompt"] or Path(options["prompt_file"]).read_text().splitlines()
    if not prompts:
        raise ValueError(f"{options['prompt_file']} has no prompt; it has one on each line")
    _quiet(transformers)
    folder = Path(options["model"])
    if options["device"].partition(":")[0] not in {"cpu", "cuda"}:
        raise ValueError(f"--device is cpu, cuda or, for example, cuda:1; not {options['device']}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; --model is a folder as Hugging Face lays it out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = stream(folder, memory=options["memory"], device=options["device"], dtype=options["dtype"])
    transformers.set_seed(options["seed"])
    sampling = {"do_sample": False}
    if options["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": options["temperature"]}
    progress = Progress(len(prompts) * options["max_new_tokens"])
    limits = {"batch": options["batch"], "max_new_tokens": options["max_new_tokens"]}
    began = time.perf_counter()
    with model.streaming.trace(options["trace"]) if options["trace"] else nullcontext():
        for index, text in model.streaming.generate(tokenizer, prompts, on_token=progress.add, **limits, **sampling):
            progress.clear()
            answer = json.dumps({"index": index, "prompt": prompts[index], "text": text}) if options["json"] else text
            say(answer)
    progress.clear()
    stats = model.streaming.stats()
    seconds = time.perf_counter() - began
    figures = {
        "new_tokens": progress.tokens,
        "seconds": seconds,
        "new_tokens_per_s": progress.tokens / seconds,
        **stats.to_dict(),
    }
    if options["json"]:
        say(json.dumps({"stats": figures}))
    line = (
        f"{progress.tokens / seconds:.2f} new tokens/s; {stats.bytes_read / 1e9:.1f} GB read at "
        f"{stats.disk_gb_per_s:.2f} GB/s, "
        f"{stats.overlap:.0%} of it behind computing; {stats.roofline:.0%} of the roofline"
    )
    show(line + "\n")
    return 0


def _stream_bench(options: dict[str, Any]) -> int:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from deepnvme._stream import roofline  # noqa: PLC0415
    from deepnvme._stream.nursery import make_llama  # noqa: PLC0415
    from deepnvme._stream.streaming import stream  # noqa: PLC0415

    _quiet(transformers)
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
        memory = given or bench_memory(model_bytes, options["dtype"], transformers.AutoConfig.from_pretrained(folder))
        model = stream(folder, memory=memory, device=options["device"], dtype=options["dtype"])
        rows = []
        for batch in options["batch"] or [1, 4, 16]:
            ids = torch.randint(0, model.config.vocab_size, (batch, options["prompt_tokens"]), device=model.device)
            rows.append(_measure(model, ids, options["new_tokens"], roofline))
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


def bench_memory(model_bytes: int, dtype: str, config: Any) -> int:
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


def _measure(model: Any, ids: Any, new_tokens: int, roofline: Any) -> dict[str, float]:
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
        limit = roofline.measure(streaming, lambda: model(ids[:, -1:], past_key_values=past, use_cache=True))
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


def _quiet(transformers: Any) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Progress:
    """A line on standard error, where that is a terminal."""

    def __init__(self, total: int) -> None:
        self.tokens = 0
        self._total, self._began = total, time.perf_counter()
        self._is_shown = is_terminal()

    def add(self, tokens: int) -> None:
        """Count tokens, and show how many there are."""
        self.tokens += tokens
        if self._is_shown:
            speed = self.tokens / max(time.perf_counter() - self._began, 1e-9)
            show(f"\r{self.tokens:,} of {self._total:,} tokens at most, {speed:.2f} tokens/s \x1b[K")

    def clear(self) -> None:
        """Make room for what is printed."""
        if self._is_shown:
            show("\r\x1b[K")
