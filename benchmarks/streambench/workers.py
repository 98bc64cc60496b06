"""``python -m streambench.workers NAME``: run one tool in its own process, which opens its model once.

Opening is not measured: ZeRO-Inference writes all parameters to its own files. While one tool generates, the others
wait on their standard input.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.child import Child, serve
from streambench.tools import Tool, Workload, all_tools
from streambench.turn import Turn, resident_bytes, take


@dataclass(frozen=True)
class Job:
    """One generation."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    """Seed of the prompts, which are random tokens."""


# Opens the model and generates a few tokens, unmeasured.
_OPEN = Job(1, 8, 2, 0)
# The disk must have delivered this fraction of the bytes that deepnvme reports, or the step was not cold.
_COLD_SHARE = 0.95


@dataclass(frozen=True)
class Answer:
    """The result of a job."""

    turn: Turn
    generated: list[int]
    roofline: dict[str, float]
    settings: dict[str, Any]


class ToolProcess:
    """A handle of a tool's process.

    Args:
        name: of the tool.
        workload: the model, and the memory and folders for it.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._is_open = False
        dtype = str(workload.dtype).split(".")[1]
        arguments = (str(workload.model), str(workload.memory), str(workload.scratch), dtype)
        log = workload.scratch / f"{name.replace(' ', '-').replace(',', '')}.log"
        self._child = Child("streambench.workers", name, *arguments, log=log)

    def open(self) -> None:
        """Have it open its model, unless that is open.

        Raises:
            NotOffered: the tool cannot, and why.
            RuntimeError: it failed.
        """
        if not self._is_open:
            self.generate(_OPEN)
            self._is_open = True

    def generate(self, job: Job) -> Answer:
        """Have it generate.

        Raises:
            NotOffered: the tool cannot, and why.
            RuntimeError: it failed.
        """
        answer = self._child.ask(asdict(job))
        return Answer(Turn(**answer["turn"]), answer["generated"], answer["roofline"], answer["settings"])

    def close(self) -> None:
        """End it."""
        self._child.close()


class _Serving:
    """The tool with its model, opened by the first request."""

    def __init__(self, name: str, workload: Workload) -> None:
        (self._one,) = (one for one in all_tools() if one.name == name)
        self._workload = workload
        self._model: Any = None
        self._start_bytes = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the model unless it is open, and generate."""
        job = Job(**request)
        one: Tool = self._one
        if self._model is None:
            # Libraries do not count as memory of the model.
            __import__("transformers.models.llama.modeling_llama")
            self._start_bytes = resident_bytes()
            self._model = one.open(self._workload)
        generator = torch.Generator().manual_seed(job.seed)
        shape = (job.batch, job.prompt_tokens)
        ids = torch.randint(0, self._model.config.vocab_size, shape, generator=generator)
        files = _files(self._workload) if one.starts_cold else []
        turn, generated = take(self._model, ids, job.new_tokens, files, self._start_bytes)
        limit = one.roofline(ids) if job != _OPEN else {}
        if limit and turn.step_bytes < _COLD_SHARE * limit["bytes"]:
            return {
                "failed": f"the disk gave {turn.step_bytes:,} of {limit['bytes']:,} bytes: the steps were not cold"
            }
        settings = {"threads": torch.get_num_threads(), **one.settings()}
        return {"turn": asdict(turn), "generated": generated, "roofline": limit, "settings": settings}


def _files(workload: Workload) -> list[Path]:
    """Return the files that are read through the page cache."""
    return sorted([*workload.model.glob("*.safetensors"), *workload.offload.glob("*.safetensors")])


def main() -> None:
    """Serve requests until there are none."""
    name, model, memory, scratch, dtype = sys.argv[1:]
    workload = Workload(Path(model), int(memory), Path(scratch), getattr(torch, dtype))
    serve(lambda: _Serving(name, workload).answer)


if __name__ == "__main__":
    main()
