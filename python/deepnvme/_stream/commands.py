"""``deepnvme generate`` and ``deepnvme stream-bench``. The Rust command line parses their arguments."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from deepnvme._stream.huggingface import check_folder, find_folder
from deepnvme._utils.devices import checked_device
from deepnvme._utils.terminal import is_terminal, report_errors, say, show
from deepnvme.errors import InvalidArgumentError, UnsupportedError

# Maximum characters of a file of prompts.
_PROMPTS_MAX = 64 << 20
# Names that tokenizers have, by pattern.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def run(name: str, options: str) -> int:
    """Run ``generate`` or ``stream-bench`` with its options as JSON. Returns the exit status."""
    return report_errors({"generate": _generate, "stream-bench": _stream_bench}[name], options)


def _lines_of(path: str) -> list[str]:
    # A pipe is fine. One that never ends is not.
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (it may be a number of a pipe: /dev/fd/63)
            text = file.read(_PROMPTS_MAX + 1)
    except OSError as error:
        text = f"--prompt-file {path}: {error.strerror}; name a text file of one prompt per line"
        raise type(error)(text) from error
    except UnicodeDecodeError as error:
        text = f"--prompt-file {path}: it is not UTF-8 ({error}); convert it, for example with iconv -t UTF-8"
        raise InvalidArgumentError(text) from error
    if len(text) > _PROMPTS_MAX:
        raise InvalidArgumentError(f"{path} has more than {_PROMPTS_MAX >> 20} million characters; split it")
    return text.splitlines()


def _tokenizer(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError:
        raise
    except BaseException as error:
        # Damaged files fail anywhere in the tokenizer's code. A panic of its Rust code is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        remedy = "copy the model's tokenizer.json and tokenizer_config.json into it"
        if any(path for name in _TOKENIZER_FILES for path in folder.glob(name)):
            msg = f"{folder}: transformers cannot read the tokenizer ({type(error).__name__}: {error}); {remedy}"
            raise UnsupportedError(msg) from error
        raise InvalidArgumentError(f"{folder} has no tokenizer; {remedy}") from error


def _generate(options: dict[str, Any]) -> int:
    import transformers  # noqa: PLC0415

    from deepnvme._stream.streaming import stream  # noqa: PLC0415

    prompts = options["prompt"] or _lines_of(options["prompt_file"])
    if not prompts:
        raise InvalidArgumentError(f"{options['prompt_file']} is empty; write one prompt per line")
    _quiet(transformers)
    if options["device"].partition(":")[0] not in {"cpu", "cuda"}:
        raise InvalidArgumentError(f"--device is {options['device']}; use cpu, cuda, or cuda:1")
    checked_device(options["device"], "--device")
    folder = find_folder(options["model"], {})
    if not (folder / "config.json").is_file():
        raise InvalidArgumentError(f"{folder} has no config.json; --model must be a Hugging Face model folder")
    check_folder(folder)
    tokenizer = _tokenizer(transformers, folder)
    model = stream(folder, memory=options["memory"], device=options["device"], dtype=options["dtype"])
    transformers.set_seed(options["seed"])
    # One sequence for each prompt, whatever the folder's generation_config.json says.
    sampling: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    if options["temperature"] > 0:
        sampling |= {"do_sample": True, "temperature": options["temperature"]}
    progress = TokenProgress(len(prompts) * options["max_new_tokens"])
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
    metrics = {
        "new_tokens": progress.tokens,
        "seconds": seconds,
        "new_tokens_per_s": progress.tokens / seconds,
        **stats.to_dict(),
    }
    if options["json"]:
        say(json.dumps({"stats": metrics}))
    line = (
        f"{progress.tokens / seconds:.2f} new tokens/s; {stats.bytes_read / 1e9:.1f} GB read at "
        f"{stats.disk_gb_per_s:.2f} GB/s, "
        f"{stats.overlap:.0%} of that time overlapped with computing; {stats.roofline_fraction:.0%} of the roofline"
    )
    show(line + "\n")
    return 0


def _stream_bench(options: dict[str, Any]) -> int:
    import transformers  # noqa: PLC0415

    from deepnvme._stream import benchmark  # noqa: PLC0415

    _quiet(transformers)
    return benchmark.run(options)


def _quiet(transformers: Any) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class TokenProgress:
    """A progress line on standard error, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self.tokens = 0
        self._total, self._began = total, time.perf_counter()
        self._is_shown = is_terminal()

    def add(self, tokens: int) -> None:
        """Count tokens and update the line."""
        self.tokens += tokens
        if self._is_shown:
            speed = self.tokens / max(time.perf_counter() - self._began, 1e-9)
            show(f"\r{self.tokens:,} of {self._total:,} tokens at most, {speed:.2f} tokens/s \x1b[K")

    def clear(self) -> None:
        """Erase the line before other output."""
        if self._is_shown:
            show("\r\x1b[K")
