"""A Checkpointer on several ranks: one file or parts, in the background, and loaded on another number of ranks."""

from __future__ import annotations

import json
import os
from filecmp import cmp
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme import errors
from deepnvme._checkpoint.distributed.save import writer_ranks
from ranks import run

SAVE = """
kind = {"layout": layout, "async_": async_}
with Checkpointer(folder, keep=2, **kind) as checkpointer:
    for step in range(4):
        assert checkpointer.save(step, {**state(step), "rank": rank, "rng": torch.full((500,), float(rank))})
    checkpointer.wait()
    answer = [checkpointer.stats().saves, checkpointer.stats().nbytes, [c.path.name for c in checkpointer.checkpoints]]
    same(checkpointer.restore(verify="full"), {**state(3), "rank": 0, "rng": torch.zeros(500)})
    same(checkpointer.restore(2), {**state(2), "rank": 0, "rng": torch.zeros(500)})
if rank == 0:
    # The name of a file is in it.
    deepnvme.save({**state(3), "rank": rank, "rng": torch.zeros(500)}, folder.parent / "step-00000003.pt")
"""


@pytest.mark.parametrize(("layout", "async_", "world"), [("file", False, 4), ("file", True, 2), ("parts", True, 4)])
def test_the_file_equals_that_of_one_process(tmp_path: Path, layout: str, async_: bool, world: int) -> None:
    folder = tmp_path / "c"
    answers = run(SAVE, world, folder, layout=layout, async_=async_)
    suffix = ".pt" if layout == "file" else ".pt.stripes.json"
    alone = tmp_path / "step-00000003.pt"
    assert answers == [[4, 4 * alone.stat().st_size, [f"step-0000000{step}{suffix}" for step in (2, 3)]]] * world
    kept = {f"step-0000000{step}.pt" for step in (2, 3)}
    if layout == "parts":
        parts = sorted(folder.glob("step-00000003.pt.part-*"))
        assert [part.name[-8:] for part in parts] == [f"{part:02}-of-{world:02}" for part in range(world)]
        assert all(part.stat().st_size >= 16 << 20 for part in parts)
        (tmp_path / "joined.pt").write_bytes(b"".join(part.read_bytes() for part in parts))
        assert cmp(tmp_path / "joined.pt", alone, shallow=False)
        assert torch.load(tmp_path / "joined.pt", weights_only=True)["step"] == 3
        assert deepnvme.load(folder / "step-00000003.pt.stripes.json", only="model.b")["model"]["b"].numel() == 100
    else:
        assert cmp(folder / "step-00000003.pt", alone, shallow=False)
    assert {path.name.partition(".pt")[0] + ".pt" for path in folder.iterdir()} == {*kept, "manifest.json.pt"}
    listed = json.loads((folder / "manifest.json").read_text())["checkpoints"]
    assert [len(entry.get("parts", [])) for entry in listed] == [world if layout == "parts" else 0] * 2


OTHER = """
with Checkpointer(folder, keep=1, layout=layout) as checkpointer:
    last = checkpointer.latest()
    if last is not None:
        loaded = checkpointer.restore(verify="full")
        same(loaded, state(last.step))
    step = last.step + 1 if last else 1
    checkpointer.save(step, state(step))
    answer = checkpointer.latest().step
"""


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for step, (world, layout) in enumerate([(4, "parts"), (2, "file"), (1, "file")], 1):
        assert run(OTHER, world, folder, layout=layout) == [step] * world
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000003.pt"}
    with deepnvme.Checkpointer(folder) as checkpointer:
        assert checkpointer.restore()["step"] == 3


OVERLAP = """
torch.manual_seed(0)
model = torch.nn.Linear(2000, 4200)
optimizer = torch.optim.AdamW(model.parameters())
expected = []
with Checkpointer(folder, keep=None) as checkpointer, checkpointer.overlap(optimizer):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2000)).pow(2).sum().backward()
        optimizer.step()
        checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected.append([model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()])
for step in range(rank, 3, world):
    loaded = checkpointer.restore(step, verify="full")
    same([loaded["model"]["weight"], loaded["optimizer"]["state"][0]["exp_avg"]], expected[step])
"""


def test_optimizers_wait_for_their_ranks_share(tmp_path: Path) -> None:
    assert run(OVERLAP, 2, tmp_path / "c") == [None, None]


CHANGED = """
tensors = {"a": torch.empty(20 << 20)}
storage = tensors["a"].untyped_storage()
with Checkpointer(folder, keep=None, async_=True, memory=memory, writers_per_node=writers) as checkpointer:
    for step in range(3):
        tensors["a"].fill_(step)
        checkpointer.save(step, tensors)
        tensors["a"].fill_(-1)
        # As FSDP does with the parameters that other ranks hold.
        storage.resize_(0)
        storage.resize_(80 << 20)
for step in range(3):
    loaded = checkpointer.restore(step, verify="full")["a"]
    assert loaded.min() == loaded.max() == step
"""


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("memory", [None, 8 << 20])
def test_tensors_may_change_when_save_returns(tmp_path: Path, memory: int | None, writers: int) -> None:
    assert run(CHANGED, 2, tmp_path / "c", memory=memory, writers=writers) == [None, None]


NODES = """
import socket
socket.gethostname = lambda: f"node-{rank // 2}"
own = folder / socket.gethostname()
with Checkpointer(own, keep=1, layout="parts", writers_per_node=1) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state(step))
    try:
        checkpointer.restore()
    except FileNotFoundError as error:
        answer = [str(error), sorted(path.name for path in own.iterdir() if path.name != ".deepnvme-lock")]
"""


def test_folders_that_machines_do_not_share(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    answers = run(NODES, 4, folder)
    lists = ["manifest.json", "step-00000002.pt.part-00-of-02", "step-00000002.pt.stripes.json"]
    other = ["step-00000002.pt.part-01-of-02"]
    assert [names for _, names in answers] == [lists, lists, other, other]
    assert "part-01-of-02" in answers[0][0] and "node-1" in answers[0][0]
    assert "stripes.json" in answers[3][0] and "node-0" in answers[3][0]
    (folder / "node-1" / "step-00000002.pt.part-01-of-02").rename(folder / "node-0" / "step-00000002.pt.part-01-of-02")
    assert deepnvme.Checkpointer(folder / "node-0").restore(verify="full")["step"] == 2
    # Another file of its size.
    part = folder / "node-0" / "step-00000002.pt.part-01-of-02"
    part.write_bytes(os.urandom(part.stat().st_size))
    with pytest.raises(errors.ChecksumError, match="not the file that was saved at step 2"):
        deepnvme.Checkpointer(folder / "node-0").restore()


BROUGHT = """
import socket
socket.gethostname = lambda: f"node-{rank // 2}"
own = folder / socket.gethostname()
deepnvme._checkpoint.distributed.parts.CHUNK_BYTES = 1_000_003
with Checkpointer(own, keep=1, layout="parts", writers_per_node=1) as checkpointer:
    checkpointer.save(1, state(1))
with Checkpointer(own, keep=1, layout="parts", writers_per_node=1) as checkpointer:
    answer = [checkpointer.fetch_parts(), checkpointer.fetch_parts()]
    checkpointer._group.all_gather(rank)
    # One that came to an end too early is fetched again.
    if rank == 0:
        os.truncate(own / "step-00000001.pt.part-01-of-02", 5)
    checkpointer._group.all_gather(rank)
    assert (checkpointer.fetch_parts() > 0) == (rank < 2)
    same(checkpointer.restore(verify="full"), state(1))
    answer.append(sorted(path.name for path in own.iterdir() if path.name != ".deepnvme-lock"))
    checkpointer.save(2, state(2))
    answer.append(sorted(path.name for path in own.iterdir() if path.name != ".deepnvme-lock"))
    # A machine has lost its disk.
    if rank == 2:
        (own / "step-00000002.pt.part-01-of-02").unlink()
    checkpointer._group.all_gather(rank)
    try:
        checkpointer.fetch_parts()
    except FileNotFoundError as error:
        answer.append(str(error))
"""


def test_parts_of_other_machines_are_fetched(tmp_path: Path) -> None:
    answers = run(BROUGHT, 4, tmp_path / "c")
    first, second = "step-00000001.pt.part-00-of-02", "step-00000001.pt.part-01-of-02"
    for rank, (fetched, again, names, later, lost) in enumerate(answers):
        assert fetched > 16 << 20
        assert again == 0
        listed = ["step-00000001.pt.stripes.json"]
        assert names == [*(["manifest.json"] if rank < 2 else []), first, second, *listed]
        # Fetched parts are removed with the checkpoint.
        assert not any("step-00000001" in name for name in later)
        assert "part-01-of-02" in lost
        assert "node-1" in lost


IMPOSTOR = """
import socket
socket.gethostname = lambda: f"node-{rank}"
own = folder / socket.gethostname()
with Checkpointer(own, layout="parts") as checkpointer:
    checkpointer.save(1, state(1))
    part = own / "step-00000001.pt.part-01-of-02"
    if rank == culprit:
        nbytes = part.stat().st_size if part.exists() else checkpointer.latest().parts[1].nbytes
        part.write_bytes(os.urandom(nbytes))
        before = part.read_bytes()
    try:
        checkpointer.fetch_parts()
        answer = "nothing"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    if rank == culprit:
        assert part.read_bytes() == before
    else:
        assert rank == 1 or not part.exists()
"""


@pytest.mark.parametrize("culprit", [0, 1])
def test_another_file_of_the_size_of_a_part_is_neither_sent_nor_replaced(culprit: int, tmp_path: Path) -> None:
    answers = run(IMPOSTOR, 2, tmp_path / "c", culprit=culprit)
    if culprit == 1:
        # The only copy is lost.
        assert all("NotFoundError" in text and "part-01-of-02 of step 1 is missing" in text for text in answers)
    else:
        assert "another file has the name of this part" in answers[0]
        assert "PeerError" in answers[1]


FULL = """
import errno, socket
socket.gethostname = lambda: f"node-{rank}"
own = folder / socket.gethostname()
with Checkpointer(own, layout="parts") as checkpointer:
    checkpointer.save(1, state(1))
    if rank == culprit:
        def refuse(*arguments, **options):
            raise OSError(errno.ENOSPC, "the disk is full")
        module = deepnvme._checkpoint.distributed.parts
        if culprit == 1:
            module._fill = refuse
        else:
            module.file.Writer.write = refuse
    try:
        checkpointer.fetch_parts()
    except (OSError, deepnvme.errors.PeerError) as error:
        names = sorted(path.name for path in own.iterdir() if path.name != ".deepnvme-lock")
        answer = [type(error).__name__, str(error), names]
    # They are together still.
    checkpointer._group.all_gather(rank)
"""


@pytest.mark.parametrize("culprit", [0, 1])
def test_fetching_fails_for_all(tmp_path: Path, culprit: int) -> None:
    answers = run(FULL, 2, tmp_path / "c", culprit=culprit)
    assert sorted(kind for kind, _, _ in answers) == ["OSError", "PeerError"]
    assert all("the disk is full" in text for _, text, _ in answers)
    assert all("step-00000001.pt.part-01-of-02" not in names for _, _, names in answers[:1])
    assert not any("tmp" in name for _, _, names in answers for name in names)


CLOCK = """
with Checkpointer(folder, every=datetime.timedelta(hours=1), async_=True) as checkpointer:
    # The clocks of the others would say yes.
    checkpointer._schedule.is_due = (lambda step, now: step == 2) if rank == 0 else (lambda step, now: True)
    answer = [checkpointer.save(step, {"a": torch.ones(3)}) for step in range(4)]
    answer.append(checkpointer.save(9, {"a": torch.ones(3)}, force=True))
"""


def test_the_leaders_clock_counts(tmp_path: Path) -> None:
    assert run(CLOCK, 2, tmp_path / "c") == [[False, False, True, False, True]] * 2


ALONE = """
own = dist.new_group([rank], use_local_synchronization=True)
with Checkpointer(folder / str(rank), process_group=own) as checkpointer:
    if rank == 1:
        checkpointer.save(1, {"a": torch.ones(3)})
    answer = len(checkpointer.checkpoints)
with Checkpointer(folder / "tensors", format="safetensors") as checkpointer:
    checkpointer.save(1, {"a": state(1)["model"]["w"], "b": torch.full((9,), rank)})
    same(checkpointer.restore(), {"a": state(1)["model"]["w"], "b": torch.zeros(9, dtype=torch.int64)})
"""


def test_a_separate_process_group_and_safetensors(tmp_path: Path) -> None:
    assert run(ALONE, 2, tmp_path / "c") == [0, 1]


DROPPED = """
import threading
def used():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))
def make():
    Checkpointer(folder, every=dt.timedelta(minutes=5)).checkpoints
import datetime as dt
make()
make()
before = used()
for _ in range(10):
    make()
answer = [after - now for now, after in zip(before, used())]
"""


def test_a_checkpointer_that_is_dropped_leaves_no_connection(tmp_path: Path) -> None:
    for grown in run(DROPPED, 2, tmp_path / "c"):
        # Threads of the last ones may still be ending. Ten kept ones have 100 descriptors and 60 threads.
        assert max(grown) < 15, grown


def test_writers_are_spread_over_machines() -> None:
    hosts = ["a", "a", "a", "b", "b", "c"]
    assert writer_ranks(hosts, None) == [0, 3, 5, 1, 4, 2]
    assert writer_ranks(hosts, 1) == [0, 3, 5]
    assert writer_ranks(hosts, 2) == [0, 3, 5, 1, 4]
