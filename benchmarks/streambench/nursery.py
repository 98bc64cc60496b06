"""``python -m streambench.nursery NAME``: a contestant in a process of its own, which opens its model once.

Opening is not measured: ZeRO-Inference writes all parameters to its own files for it. While one generates, the
others wait at their standard input.

One request for each line of standard input, one answer for each line of standard output, both JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from storagebench.contestants.base import NotOffered
from streambench.contestants import Contestant, Setting, everybody
from streambench.turn import Turn, resident_bytes, take


@dataclass(frozen=True)
class Errand:
    """One generation."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    """Of the prompts, which are tokens at random."""


# Has the child open its model, and generate a few tokens that nobody measures.
_OPEN = Errand(1, 8, 2, 0)
# Of what a step of ours says it reads, the disk must have given so much, or it was not cold.
_COLD_SHARE = 0.95


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    turn: Turn
    generated: list[int]
    roofline: dict[str, float]
    settings: dict[str, Any]


class Child:
    """The process of a contestant, as its user sees it.

    Args:
        name: of the contestant.
        setting: what it is given.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self._is_open = False
        command = [sys.executable, "-m", "streambench.nursery", name]
        command += [str(setting.model), str(setting.memory), str(setting.scratch), str(setting.dtype).split(".")[1]]
        log = setting.scratch / f"{name.replace(' ', '-').replace(',', '')}.log"
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def open(self) -> None:
        """Have it open its model, unless that is open.

        Raises:
            NotOffered: the contestant cannot, and why.
            RuntimeError: it failed.
        """
        if not self._is_open:
            self.generate(_OPEN)
            self._is_open = True

    def generate(self, errand: Errand) -> Answer:
        """Have it generate.

        Raises:
            NotOffered: the contestant cannot, and why.
            RuntimeError: it failed.
        """
        try:
            print(json.dumps(asdict(errand)), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline() if self._process.stdout else ""
        except BrokenPipeError:
            line = ""
        answer = json.loads(line or '{"failed": "its process has ended"}')
        if "not_offered" in answer:
            raise NotOffered(answer["not_offered"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return Answer(Turn(**answer["turn"]), answer["generated"], answer["roofline"], answer["settings"])

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Serving:
    """The contestant with its model, once somebody has asked for it."""

    def __init__(self, name: str, setting: Setting) -> None:
        (self._one,) = (one for one in everybody() if one.name == name)
        self._setting = setting
        self._model: Any = None
        self._start_bytes = 0

    def answer(self, errand: Errand) -> dict[str, Any]:
        """Open the model unless it is open, and generate."""
        one: Contestant = self._one
        if self._model is None:
            # Libraries are no part of what a model takes.
            __import__("transformers.models.llama.modeling_llama")
            self._start_bytes = resident_bytes()
            self._model = one.open(self._setting)
        generator = torch.Generator().manual_seed(errand.seed)
        shape = (errand.batch, errand.prompt_tokens)
        ids = torch.randint(0, self._model.config.vocab_size, shape, generator=generator)
        files = _files(self._setting) if one.is_cached else []
        turn, generated = take(self._model, ids, errand.new_tokens, files, self._start_bytes)
        limit = one.roofline(ids) if errand != _OPEN else {}
        if limit and turn.step_bytes < _COLD_SHARE * limit["bytes"]:
            return {
                "failed": f"the disk gave {turn.step_bytes:,} of {limit['bytes']:,} bytes: the steps were not cold"
            }
        settings = {"threads": torch.get_num_threads(), **one.settings()}
        return {"turn": asdict(turn), "generated": generated, "roofline": limit, "settings": settings}


def _files(setting: Setting) -> list[Path]:
    """Give all that is read by the page cache."""
    return sorted([*setting.model.glob("*.safetensors"), *setting.offload.glob("*.safetensors")])


def main() -> None:
    """Serve requests until there are none."""
    # What a rival prints belongs to nobody's answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, model, memory, scratch, dtype = sys.argv[1:]
    serving = _Serving(name, Setting(Path(model), int(memory), Path(scratch), getattr(torch, dtype)))
    for line in sys.stdin:
        try:
            answer = serving.answer(Errand(**json.loads(line)))
        except NotOffered as reason:
            answer = {"not_offered": str(reason)}
        except Exception as error:  # noqa: BLE001 - whatever a rival throws is an answer
            answer = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)
    # Threads and hooks of rivals have been seen to hang at the end of a process that has nothing to lose.
    os._exit(0)


if __name__ == "__main__":
    main()
