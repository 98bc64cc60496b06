"""Nobody waits for a rank that failed alone, was interrupted, or restores something else: all answer at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ranks import run

# `sharded(seed)` has a DTensor, and values that each rank has. `timed` returns the name, text and seconds of an error.
# The ranks live on for longer than any answer takes, so that no connection closes because a process ended.
BOOT = """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

def sharded(seed):
    numbers = torch.arange(700 * 300, dtype=torch.float32).view(700, 300) + seed
    tensor = distribute_tensor(numbers, DeviceMesh("cpu", list(range(world))), [Shard(0)])
    return {"tensor": tensor, "extra": {"x": torch.full((3,), float(seed))}, "step": seed}

def timed(call):
    began = time.monotonic()
    try:
        call()
        found = ["none", ""]
    except BaseException as error:
        found = [type(error).__name__, str(error)]
    return [*found, time.monotonic() - began]

def interrupt_after(seconds):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

class Refusing:
    def __init__(self, refuses): self.refuses = refuses
    def load_state_dict(self, state): pass
    def state_dict(self):
        if self.refuses: raise ArithmeticError("this rank refuses")
        return {"value": torch.ones(4)}
"""
END = """
time.sleep(3)
"""
RANK_0_IS_LATE = """
dist.barrier()
if rank == 0:
    time.sleep(2.5)
else:
    interrupt_after(0.5)
"""
# For a rank that answers seconds before the other.
LATE_END = """
time.sleep(6)
"""
SAVED = """
checkpointer = Checkpointer(folder, **options)
for step in (1, 2):
    checkpointer.save(step, sharded(step))
# Making a DTensor is a collective.
into, new = sharded(0), sharded(3)
dist.barrier()
"""

SAVED_IN_PARTS = """
checkpointer = Checkpointer(folder, layout="parts")
checkpointer.save(1, state(1))
"""

RESTORE = "lambda: checkpointer.restore(into=into)"


class OneRankFails(NamedTuple):
    """A restore, the error of rank 1, which is at fault, and that of rank 0."""

    before: str
    call: str
    error: str
    text: str
    others: str = "PeerError"
    others_text: str = "rank 1 .* failed"


RESTORES = {
    "a part without tensors": OneRankFails(
        "if rank == 1: into['extra'] = {}", RESTORE, "InvalidArgumentError", "is empty"
    ),
    "a list": OneRankFails("into = into if rank == 0 else [1]", RESTORE, "TypeError", "fills a dict"),
    "a wrong word": OneRankFails(
        "more = {'verify': 'bad'} if rank == 1 else {}",
        "lambda: checkpointer.restore(into=into, **more)",
        "InvalidArgumentError",
        "verify is 'bad'",
    ),
    "without into": OneRankFails(
        "more = {'into': into} if rank == 0 else {}",
        "lambda: checkpointer.restore(**more)",
        "InvalidArgumentError",
        r"Call restore\(into=state\)",
    ),
    "another step": OneRankFails(
        "",
        "lambda: checkpointer.restore(1 + rank, into=into)",
        "InvalidArgumentError",
        "rank 1 .* restores .*2.*rank 0 .*1",
        "InvalidArgumentError",
        "restores",
    ),
    "a step that does not exist": OneRankFails(
        "",
        "lambda: checkpointer.restore(2 if rank == 0 else 77, into=into)",
        "NotFoundError",
        "step 77",
        others_text="another process ended",
    ),
    "an object that refuses": OneRankFails(
        "into['object'] = Refusing(rank == 1)",
        RESTORE,
        "ArithmeticError",
        "refuses",
        others_text="another process ended",
    ),
}


def check(answers: list[Any], error: str, text: str, others: str, others_text: str) -> None:
    """Check the answer of rank 1, which is at fault, and of rank 0."""
    (name_0, text_0, seconds_0), (name_1, text_1, seconds_1) = answers
    assert (name_1, name_0) == (error, others), answers
    assert re.search(text, text_1), text_1
    assert re.search(others_text, text_0), text_0
    assert max(seconds_0, seconds_1) < 2.9, "the end of a process answered"


@pytest.mark.parametrize("case", RESTORES)
def test_a_restore_that_fails_on_one_rank(tmp_path: Path, case: str) -> None:
    before, call, *expected = RESTORES[case]
    code = f"{BOOT}{SAVED}{before}\nanswer = timed({call})\n{END}"
    check(run(code, 2, tmp_path / "c", options={}), *expected)


@pytest.mark.parametrize("async_", [False, True])
def test_an_object_that_refuses_on_one_rank(tmp_path: Path, async_: bool) -> None:
    code = f"""{BOOT}{SAVED}
state = {{**new, 'object': Refusing(rank == 1)}}
answer = timed(lambda: (checkpointer.save(3, state), checkpointer.wait()))
state["object"].refuses = False
checkpointer.save(4, state)
checkpointer.wait()
assert [found.step for found in checkpointer.checkpoints] == [1, 2, 4]
{END}"""
    answers = run(code, 2, tmp_path / "c", options={"async_": async_})
    check(answers, "ArithmeticError", "refuses", "PeerError", "rank 1 .* failed.*refuses")


@pytest.mark.parametrize("argument", ["-1", "{}"])
def test_a_wrong_step_on_one_rank(tmp_path: Path, argument: str) -> None:
    code = f"{BOOT}{SAVED}\nanswer = timed(lambda: checkpointer.save(3 if rank == 0 else {argument}, new)){END}"
    name = "TypeError" if argument == "{}" else "InvalidArgumentError"
    check(run(code, 2, tmp_path / "c", options={}), name, "step is", "PeerError", "another process ended")


def test_a_wrong_argument_of_the_constructor_on_one_rank(tmp_path: Path) -> None:
    code = f"{BOOT}\nanswer = timed(lambda: Checkpointer(folder, keep=3 - 3 * rank)){END}"
    check(run(code, 2, tmp_path / "c"), "InvalidArgumentError", "keep", "PeerError", "rank 1 .* failed.*keep")


@pytest.mark.parametrize("call", ["Checkpointer(folder, layout='parts')", "checkpointer.fetch_parts()"])
def test_a_folder_that_one_rank_cannot_see(tmp_path: Path, call: str) -> None:
    code = f"""{BOOT}{SAVED_IN_PARTS}from deepnvme._checkpoint import history
from deepnvme._checkpoint.distributed import parts
def refuse(_): raise PermissionError("this folder is hidden")
if rank == 1:
    history.place_of = parts.place_of = refuse
answer = timed(lambda: {call})
{END}"""
    check(run(code, 2, tmp_path / "c"), "PermissionError", "hidden", "PeerError", "rank 1 .* failed.*hidden")


CALLS = {
    "a sharded restore": "checkpointer.restore(into=into)",
    "a sharded save": "checkpointer.save(3, new)",
    "a save": "checkpointer.save(3, plain)",
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("async_", [False, True])
def test_an_interrupt_while_another_rank_is_late(tmp_path: Path, call: str, async_: bool) -> None:
    code = f"""{BOOT}{SAVED}
checkpointer.wait()
plain = state(3)
{RANK_0_IS_LATE}answer = timed(lambda: ({CALLS[call]}, checkpointer.wait()))
assert [found.step for found in deepnvme.Checkpointer(folder, process_group=alone).checkpoints] == [1, 2]
{LATE_END}"""
    alone = "alone = [dist.new_group([one]) for one in range(world)][rank]\n"
    answers = run(alone + code, 2, tmp_path / "c", options={"async_": async_})
    check(answers, "KeyboardInterrupt", "", "PeerError", "another process ended")
    assert answers[1][2] < 2


FETCHES = {
    "a step that does not exist": (
        "77 if rank else 1", "NotFoundError", "step 77", "PeerError", "rank 1 .* failed.*step 77"
    ),
    "another step": (
        "1 + rank", "InvalidArgumentError", "rank 1 .* fetches .*2.*rank 0 .*1", "InvalidArgumentError", "fetches"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FETCHES)
def test_parts_of_another_step_on_one_rank(tmp_path: Path, case: str) -> None:
    step, *expected = FETCHES[case]
    code = f"""{BOOT}
checkpointer = Checkpointer(folder, layout="parts")
for saved in (1, 2):
    checkpointer.save(saved, state(saved))
answer = timed(lambda: checkpointer.fetch_parts({step}))
{END}"""
    check(run(code, 2, tmp_path / "c"), *expected)


def test_kinds_of_every_that_differ(tmp_path: Path) -> None:
    every = "dt.timedelta(seconds=1) if rank else 5"
    code = f"import datetime as dt\n{BOOT}\nanswer = timed(lambda: Checkpointer(folder, every={every})){END}"
    check(run(code, 2, tmp_path / "c"), "InvalidArgumentError", "every is", "InvalidArgumentError", "every is")


@pytest.mark.parametrize("call", ["Checkpointer(folder)", "checkpointer.fetch_parts()"])
def test_an_interrupt_of_a_call_that_another_rank_makes_later(tmp_path: Path, call: str) -> None:
    code = f"""{BOOT}{SAVED_IN_PARTS}{RANK_0_IS_LATE}answer = timed(lambda: {call})
{LATE_END}"""
    answers = run(code, 2, tmp_path / "c")
    check(answers, "KeyboardInterrupt", "", "PeerError", "another process ended")
    assert answers[1][2] < 2


def test_a_wrong_step_on_one_rank_with_a_timer(tmp_path: Path) -> None:
    code = f"""import datetime as dt
{BOOT}
checkpointer = Checkpointer(folder, every=dt.timedelta(seconds=0.001))
checkpointer.save(1, state(1))
answer = timed(lambda: checkpointer.save(-1 if rank else 2, state(2)))
{END}"""
    check(run(code, 2, tmp_path / "c"), "InvalidArgumentError", "step is", "PeerError", "another process ended")


def test_a_wrong_step_on_one_rank_after_a_refused_save(tmp_path: Path) -> None:
    code = f"""{BOOT}{SAVED}
different = {{**new, "x": torch.ones(5, dtype=torch.int32 if rank else torch.float32)}}
refused = timed(lambda: checkpointer.save(3, different))
assert refused[0] != "none"
answer = timed(lambda: checkpointer.save(-1 if rank else 4, new))
{END}"""
    answers = run(code, 2, tmp_path / "c", options={})
    check(answers, "InvalidArgumentError", "step is", "PeerError", "another process ended")


@pytest.mark.parametrize("first", ["dist.new_group([0, 1])", "None"], ids=["some ranks", "one rank"])
def test_groups_of_all_ranks_after_a_group_of_some(tmp_path: Path, first: str) -> None:
    code = f"""
pair = {first}
if pair is not None and rank < 2:
    with Checkpointer(folder, process_group=pair) as some:
        some.save(1, state(1))
if pair is None and rank == 0:
    own = dist.new_group([0], use_local_synchronization=True)
    with Checkpointer(folder, process_group=own) as alone:
        alone.save(1, state(1))
with Checkpointer(folder.with_name("all")) as checkpointer:
    checkpointer.save(1, state(2))
    same(checkpointer.restore(), state(2))
if pair is not None:
    # Those of torch have equal names everywhere.
    dist.barrier(group=dist.new_group([0, 1, 2]))
    for members in ([1, 2], [0, 1], [0, 1]):
        group = dist.new_group(members)
        if rank in members:
            with Checkpointer(folder.with_name(f"some-{{members}}"), process_group=group) as some:
                some.save(1, state(3))
answer = True
"""
    assert run(code, 3, tmp_path / "c") == [True] * 3


def test_parts_of_ranks_with_a_folder_each_on_one_machine(tmp_path: Path) -> None:
    code = f"""{BOOT}
mine = folder.with_name(f"disk-{{rank}}")
with Checkpointer(mine, layout="parts", keep=1) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, state(step))
    names = sorted(path.name for path in mine.iterdir() if "part-" in path.name)
    fetched = checkpointer.fetch_parts()
    same(checkpointer.restore(verify="full"), state(3))
answer = [names, fetched]
"""
    (names_0, fetched_0), (names_1, fetched_1) = run(code, 2, tmp_path / "c")
    assert names_0 == ["step-00000003.pt.part-00-of-02"]
    assert names_1 == ["step-00000003.pt.part-01-of-02"]
    assert min(fetched_0, fetched_1) > 30 << 20
