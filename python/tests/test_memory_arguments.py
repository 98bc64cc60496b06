"""What each argument for memory takes, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme._utils.memory import available_bytes, check_available
from deepnvme.errors import InvalidArgumentError, OutOfMemoryError

torch = pytest.importorskip("torch")

Call = Callable[[Path, Any], object]


def module(folder: Path) -> Any:
    made = torch.nn.Linear(64, 64)
    deepnvme.save(made.state_dict(), folder / "w.safetensors")
    return made


def use_swapper(folder: Path, memory: Any) -> None:
    with deepnvme.Swapper(folder, memory=memory) as swapper:
        swapper.put("w", torch.zeros(10))


def use_optimizer(folder: Path, memory: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = deepnvme.optim.AdamW([parameter], swap_dir=folder, memory=memory)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.close()


def use_offloading(folder: Path, memory: Any) -> None:
    deepnvme.offload_parameters(module(folder), memory=memory, swap_dir=folder).close()


def use_stream(folder: Path, memory: Any) -> None:
    deepnvme.stream(module(folder), weights=folder / "w.safetensors", memory=memory).streaming.close()


def use_checkpointer(folder: Path, memory: Any) -> None:
    with deepnvme.Checkpointer(folder / "run", async_=True, memory=memory) as checkpointer:
        checkpointer.save(1, {"a": torch.zeros(3)})


ALLOCATED: dict[str, Call] = {
    "Swapper": use_swapper,
    "optim.AdamW": use_optimizer,
    "offload_parameters": use_offloading,
}
# They allocate what they need, so a bound may be larger than the machine.
BOUNDS: dict[str, Call] = {"stream": use_stream, "Checkpointer": use_checkpointer}
ALL = {**ALLOCATED, **BOUNDS}


@pytest.mark.parametrize("use", ALL.values(), ids=ALL)
@pytest.mark.parametrize("memory", ["", "0", "-1GB", "1 QB", "lots", 2**70, -1, 0])
def test_values_that_are_no_sizes(tmp_path: Path, use: Call, memory: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory is .*'4GB' .*'512MiB' .*'64K' .* between 1 and"):
        use(tmp_path, memory)


@pytest.mark.parametrize("use", ALL.values(), ids=ALL)
@pytest.mark.parametrize("memory", [True, 1.5, float("nan"), b"4GB"])
def test_values_of_other_types(tmp_path: Path, use: Call, memory: Any) -> None:
    with pytest.raises(TypeError, match=r"memory is .*'4GB' .* between 1 and"):
        use(tmp_path, memory)


@pytest.mark.parametrize("use", ALLOCATED.values(), ids=ALLOCATED)
@pytest.mark.parametrize("memory", ["900TB", "1 PB", (1 << 63) - 1])
def test_more_memory_than_the_machine_has(tmp_path: Path, use: Call, memory: Any) -> None:
    expected = r"memory is [\d,]+ bytes, and [\d,]+ are available .*use memory='\d+[GM]B'"
    with pytest.raises(OutOfMemoryError, match=expected):
        use(tmp_path, memory)


@pytest.mark.parametrize("use", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("memory", ["1TB", "1 PB", (1 << 63) - 1])
def test_a_bound_that_nothing_reaches(tmp_path: Path, use: Call, memory: Any) -> None:
    use(tmp_path, memory)


def test_memory_is_asked_for_where_it_is_needed(tmp_path: Path) -> None:
    for use in (use_swapper, use_offloading, use_stream):
        with pytest.raises(TypeError, match="memory is None"):
            use(tmp_path, None)
    with pytest.raises(ValueError, match="memory='4GB'"):
        use_optimizer(tmp_path, None)
    use_checkpointer(tmp_path, None)


def test_a_refused_bound_leaves_a_meta_model_as_it_was(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(OutOfMemoryError):
        deepnvme.offload_parameters(model, memory="900TB", swap_dir=tmp_path)
    assert model.weight.is_meta


def test_the_remedy_fits_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, remedy in ((24_000_000_000, "'18GB'"), (8_000_000_000, "'6000MB'"), (1_000, "end other programs")):
        monkeypatch.setattr("deepnvme._utils.memory.available_bytes", lambda found=available: found)
        with pytest.raises(MemoryError, match=remedy):
            check_available(1 << 40)
    monkeypatch.setattr("deepnvme._utils.memory.available_bytes", lambda: None)
    check_available(1 << 40)


def test_available_memory_is_that_of_the_smallest_cgroup(tmp_path: Path) -> None:
    """A container may have less memory than its machine."""
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "pod/run").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    assert available_bytes(tmp_path) == 8_000_000 << 10
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/x\n0::/pod/run\n")
    assert available_bytes(tmp_path) == 8_000_000 << 10
    for group, limit, used, cache in (("pod", "5000000000", 4_000_000_000, 300_000_000), ("pod/run", "max", 1, 0)):
        (groups / group / "memory.max").write_text(f"{limit}\n")
        (groups / group / "memory.current").write_text(f"{used}\n")
        (groups / group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert available_bytes(tmp_path) == 1_300_000_000
    (groups / "pod/run/memory.max").write_text("70000\n")
    assert available_bytes(tmp_path) == 69_999
    (groups / "pod/memory.current").write_text("9000000000\n")
    assert available_bytes(tmp_path) == 0
