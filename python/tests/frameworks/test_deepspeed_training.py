"""A real DeepSpeed trains a real language model with its state on disk: on deepnvme's op, on its own, and in memory.

Losses are compared bit by bit. Each op has its own processes, in which the jobs run one after the other.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import zero_jobs
from .build_deepspeed_ops import path_with_ninja

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make test-frameworks")
if "DEEPNVME_TEST_FRAMEWORKS" not in os.environ:
    pytest.skip("real training runs take minutes: make test-frameworks", allow_module_level=True)

PROGRAM = Path(__file__).with_name("zero_program.py")
SHARED_MODULES = Path(__file__).parents[1] / "shared"
# Built by `make test-frameworks`. Tests never compile.
OPS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix) / "torch_extensions"))
SECONDS_MAX = 3600
# This project's own pages, read once, since they may be edited while the tests run.
ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "".join(page.read_text() for page in PAGES)


def is_built(op: str) -> bool:
    return any((OPS / op).glob(f"{op}*.so"))


# DeepSpeed's own Adam if it could be built; the same for both ops.
ADAM = {} if is_built("cpu_adam") else {"torch_adam": True}
needs_their_op = pytest.mark.skipif(
    not is_built("async_io"),
    reason="DeepSpeed's own async_io is not built (make test-frameworks: needs g++, libaio-dev)",
)


def train(
    op: str, folder: Path, jobs: list[dict[str, Any]], *, processes: int = 1, options: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Run jobs. Returns the answers of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_text(TEXT)
    errand = json.dumps({"op": op, "answers": str(folder / "answers"), "text": str(folder / "text"), "jobs": jobs})
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(OPS),
        "PATH": path_with_ninja(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "PYTHONPATH": os.pathsep.join([str(SHARED_MODULES), os.environ.get("PYTHONPATH", "")]),
    }
    logs = [folder / f"log{rank}" for rank in range(processes)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *options, str(PROGRAM), errand]
            running.append(subprocess.Popen(command, env=ranked, stdout=output, stderr=subprocess.STDOUT))
    try:
        statuses = [process.wait(SECONDS_MAX) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not any(statuses), "\n".join(log.read_text()[-4000:] for log in logs)
    lines = [line for rank in range(processes) for line in (folder / f"answers{rank}").read_text().splitlines()]
    return [json.loads(line) for line in lines]


def by_name(answers: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {answer["name"]: answer for answer in answers}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ours")
    return by_name(train("ours", folder, zero_jobs.in_memory(folder, ADAM) + zero_jobs.single(folder, ADAM)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("theirs")
    jobs = [job for job in zero_jobs.single(folder, ADAM) if job["name"] in SHARED]
    return by_name(train("theirs", folder, jobs))


CASES = {job["name"]: job for job in zero_jobs.single(Path(), {})}
SHARED = [name for name, job in CASES.items() if not job.get("only_ours")]


@pytest.mark.parametrize("case", CASES)
def test_in_memory(ours: dict[str, dict[str, Any]], case: str) -> None:
    expected = ours[CASES[case]["like"]]["losses"]
    assert ours[case]["losses"] == expected
    if "inference" not in case:
        assert len(set(expected)) == len(expected), "it did not train"
        assert expected[-1] < expected[0]
    zero = CASES[case]["config"]["zero_optimization"]
    swapped = ours[case]["swapped"]
    if "nvme" in zero.get("offload_optimizer", {}).values():
        assert any(name.startswith("exp_avg_sq") for name in swapped), swapped
        assert any("gradient" in name for name in swapped), swapped
    if "nvme" in zero.get("offload_param", {}).values():
        assert any(name.endswith("_param.tensor.swp") for name in swapped), swapped


@needs_their_op
@pytest.mark.parametrize("case", SHARED)
def test_deepspeeds_own_op(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], case: str) -> None:
    assert ours[case]["losses"] == theirs[case]["losses"]
    # The same files: the op does not choose what is swapped.
    assert len(ours[case]["swapped"]) == len(theirs[case]["swapped"])


@pytest.mark.parametrize("name", ["saving", zero_jobs.SMALL_GROUPS])
@pytest.mark.parametrize("processes", [1, 2])
def test_checkpoint(tmp_path: Path, processes: int, name: str) -> None:
    saved, loaded = (
        train("ours", tmp_path, [job for job in jobs if job["name"] == name], processes=processes)
        for jobs in (zero_jobs.saving(tmp_path, ADAM), zero_jobs.loading(tmp_path, ADAM))
    )
    assert len(saved) == len(loaded) == processes
    for before, after in zip(saved, loaded, strict=True):
        assert after["loaded"]
        assert after["losses"] == before["after"]
    assert len({str(answer["losses"]) for answer in loaded}) == processes, "they had the same data"


def test_checkpoint_writer(tmp_path: Path) -> None:
    saved = by_name(train("ours", tmp_path, zero_jobs.saving(tmp_path, ADAM)[1:2]))
    loaded = by_name(train("ours", tmp_path, zero_jobs.loading(tmp_path, ADAM)[1:2]))
    assert loaded["saving, writer"]["losses"] == saved["saving, writer"]["after"]


def two(op: str, folder: Path, **more: Any) -> list[list[float]]:
    """Return the losses of both ranks in the first job, which all of them contain."""
    answers = train(op, folder, zero_jobs.pair(folder, ADAM, **more), processes=2)
    both = [answers[:3], answers[3:]]
    for rank in both:
        memory, optimizer, pipelined = (answer["losses"] for answer in rank)
        assert memory == optimizer == pipelined
        assert any(name.startswith("exp_avg") for name in rank[1]["swapped"])
        assert any(name.endswith("_param.tensor.swp") for name in rank[2]["swapped"])
    assert both[0][0]["losses"] != both[1][0]["losses"], "they had the same data"
    return [rank[0]["losses"] for rank in both]


def test_two_processes(tmp_path: Path) -> None:
    """With parts of parameters that are not aligned."""
    two("ours", tmp_path)


@needs_their_op
def test_two_processes_on_deepspeeds_own_op(tmp_path: Path) -> None:
    aligned = {"width": zero_jobs.WIDTH_FOR_THEIRS}
    assert two("ours", tmp_path / "ours", **aligned) == two("theirs", tmp_path / "theirs", **aligned)


def test_python_without_asserts(tmp_path: Path, ours: dict[str, dict[str, Any]]) -> None:
    """DeepSpeed reads and writes inside of `assert`, which `python -O` removes."""
    (job,) = (job for job in zero_jobs.single(tmp_path, ADAM) if job["name"] == "bf16, pipelined")
    (answer,) = train("ours", tmp_path, [job], options=("-O",))
    assert answer["losses"] == ours["memory, bf16"]["losses"]
    assert len(answer["swapped"]) == len(ours["bf16, pipelined"]["swapped"])
