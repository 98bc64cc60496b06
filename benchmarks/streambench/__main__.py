"""``python -m streambench``: generate with every tool, in alternating rounds."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from common import cache, command, verdict
from common.disk_idle import DiskIdleProbe, idle_disk
from common.not_offered import NotOffered
from common.round_order import order
from streambench import summary
from streambench.summary import Row
from streambench.tools import Tool, Workload, all_tools
from streambench.workers import Answer, Job, ToolProcess

# Batch and tokens of each prompt.
_ROWS = {"b1-p8": (1, 8), "b16-p8": (16, 8), "b1-p512": (1, 512), "b16-p512": (16, 512)}
_SEED = 20
_DTYPES = ("bfloat16", "float32")
# How torch's threads wait for work: the same for all tools.
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass
class Contest:
    """All tools, each in a process of its own, and the disk that they share."""

    tools: list[Tool]
    workload: Workload
    rounds: int
    disk: DiskIdleProbe
    children: dict[str, ToolProcess] = field(default_factory=dict)

    def measure(self, row: Row) -> None:
        """Run all rounds of one row: one that is not counted, then as many as were asked for."""
        for index in range(self.rounds + 1):
            # Each round has other prompts, and begins with the model in memory, with which all others are compared.
            job = replace(row.job, seed=row.job.seed + index)
            expected: list[int] = []
            for one in [self.tools[0], *order(self.tools[1:], index)]:
                if one.name in row.left_out:
                    continue
                try:
                    answer = self._ask(one, job, expected)
                except (NotOffered, RuntimeError) as error:
                    row.left_out[one.name] = str(error)
                    _tell(row, one.name, f"left out: {error}")
                    continue
                if one.is_exact:
                    expected = answer.generated
                if index > 0:
                    row.answers.setdefault(one.name, []).append(answer)
                turn = answer.turn
                note = "" if index > 0 else " (not counted)"
                _tell(row, one.name, f"step {turn.step_s:.3f} s, prompt {turn.prompt_s:.2f} s{note}")

    def _ask(self, one: Tool, job: Job, expected: list[int]) -> Answer:
        if one.name not in self.children:
            self.children[one.name] = ToolProcess(one.name, self.workload)
        child = self.children[one.name]
        try:
            child.open()
            # Let the disk finish the work of earlier rows and of opening.
            self.disk.wait()
            answer = child.generate(job)
        finally:
            if one.ends_with_turn:
                self.children.pop(one.name).close()
        if one.is_exact and expected and answer.generated != expected:
            raise RuntimeError("it generated other tokens than those before it")
        return answer

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.close()


def _tell(row: Row, name: str, text: str) -> None:
    print(f"{row.key:9} {name:28} {text}", file=sys.stderr, flush=True)


def _make_model(folder: Path, nbytes: int) -> int:
    """Write the model in a process that ends, so that this one stays small."""
    folder.mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        from deepnvme._stream.benchmark import make_llama  # noqa: PLC0415

        os.write(writing, str(make_llama(folder, nbytes)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        made = pipe.read()
    os.waitpid(child, 0)
    for path in folder.glob("*.safetensors"):
        cache.make_cold(path)
    return int(made)


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="streambench", description=__doc__)
    parser.add_argument("--rows", default=",".join(_ROWS), help=f"some of {', '.join(_ROWS)} (default: all)")
    command.add_options(parser, rounds=5)
    parser.add_argument("--mb", type=int, default=1200, help="approximate size of the weights in MB (10^6 bytes)")
    parser.add_argument("--new-tokens", type=int, default=8, help="number of new tokens per prompt")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default=_DTYPES[0],
        help="dtype of the computation; the files have bfloat16",
    )
    parser.add_argument("--without", default="", help="tools to leave out, separated by semicolons")
    parser.add_argument("--name", default="stream", help="name of the record, after its date")
    arguments = parser.parse_args()
    return command.run_in_scratch(arguments.scratch, "stream", lambda scratch: _run(arguments, scratch))


def _run(arguments: argparse.Namespace, scratch: Path) -> Path:
    """Measure all rows, and write the record after each. Returns its path."""
    made = _make_model(scratch / "model", arguments.mb * 1_000_000)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    # A quarter of the model's size in memory.
    workload = Workload(scratch / "model", made // torch.bfloat16.itemsize * dtype.itemsize // 4, scratch, dtype)
    rows: list[Row] = []
    tools = [one for one in all_tools() if one.name not in arguments.without.split(";")]
    loads = [os.getloadavg()[0]]
    with idle_disk(scratch) as disk, closing(Contest(tools, workload, arguments.rounds, disk)) as contest:
        for key in arguments.rows.split(","):
            job = Job(*_ROWS[key], arguments.new_tokens, _SEED)
            rows.append(Row(key, job, {one.name: str(one.group) for one in tools}))
            contest.measure(rows[-1])
            loads.append(os.getloadavg()[0])
            print(summary.table(rows[-1]), flush=True)
            fields = {
                "threads_wait": {name: os.environ[name] for name in _WAITING if name in os.environ},
                "dtype": arguments.dtype,
                "model_bytes": made,
                "memory_bytes": workload.memory,
                "rounds": arguments.rounds,
                "took_no_part": [name for name in arguments.without.split(";") if name],
                "load": loads,
                "rows": [summary.row_to_json(row) for row in rows],
            }
            path = command.write_record(arguments.results, arguments.name, scratch, fields)
    for row in rows:
        verdict.print_recorded(summary.verdicts(row))
    return path


if __name__ == "__main__":
    sys.exit(main())
