"""torch.distributed.checkpoint on deepnvme: one process, several, and another number of them for loading."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import deepnvme
from deepnvme import errors
from deepnvme._checkpoint.dcp import index as _dcp_index
from deepnvme._checkpoint.dcp import shard as _dcp_shard
from deepnvme._checkpoint.dcp.shard import Shard
from deepnvme._checkpoint.dcp.writer import _free_name
from deepnvme._deepnvme import _crc64
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
from programs import program, status_of

from .states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "note": "text",
        "complex": torch.randn(3, 2, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(6, 4).t(),
    }


def test_one_process(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    target = state_of(2)
    load(target, storage_reader=DeepnvmeReader(tmp_path), no_dist=True)
    assert_same({**target, "strided": None}, {**state, "strided": None})
    assert torch.equal(target["strided"], state["strided"])
    (shard,) = tmp_path.glob("shard-*.safetensors")
    assert torch.equal(load_file(shard)["model.weight"], state["model"]["weight"])


def test_the_old_checkpoint_counts_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DeepnvmeWriter(tmp_path)
    first = state_of(1)
    save(first, storage_writer=writer, no_dist=True)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the coordinator died")

    monkeypatch.setattr(DeepnvmeWriter, "finish", broken)
    with pytest.raises(CheckpointException, match="coordinator died"):
        save(state_of(2), storage_writer=writer, no_dist=True)
    monkeypatch.undo()
    target = state_of(3)
    load(target, storage_reader=DeepnvmeReader(tmp_path), no_dist=True)
    assert torch.equal(target["model"]["weight"], first["model"]["weight"])
    save(state_of(4), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.iterdir())) == 2, "what is left of the others is gone"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 9}',
    '{"version": 1, "planner_data": null, "entries": {"a": {"bytes": ["../x", "a"]}}}'])  # fmt: skip
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "deepnvme.json").write_text(text)
    with pytest.raises((errors.CorruptFileError, CheckpointException), match=r"deepnvme\.json"):
        DeepnvmeReader(tmp_path).read_metadata()


def damaged(folder: Path, name: str, place: int) -> None:
    """Flip a bit of a tensor."""
    (shard,) = folder.glob("shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    header = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + header])[name]["data_offsets"][0]
    data[8 + header + begin + place] ^= 8
    shard.write_bytes(data)


def loaded(folder: Path, target: dict[str, Any], **options: Any) -> dict[str, Any]:
    load(target, storage_reader=DeepnvmeReader(folder, **options), no_dist=True)
    return target


@pytest.mark.parametrize(
    ("name", "place"),
    [("big", 0), ("big", 5 << 20), ("turned", 2_000_000), ("scalar", 1), ("note", 3), ("model.weight", 99)],
)
def test_a_flipped_bit_is_found(tmp_path: Path, name: str, place: int) -> None:
    state = {**state_of(1), "big": torch.randn(2_000_000), "turned": torch.randn(1000, 1000).t()}
    save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    target = {**state_of(2), "big": torch.zeros(2_000_000), "turned": torch.zeros(1000, 1000).t()}
    loaded(tmp_path, target, verify="full")
    assert torch.equal(target["big"], state["big"])
    assert torch.equal(target["turned"], state["turned"])
    damaged(tmp_path, name, place)
    with pytest.raises(CheckpointException, match=rf"{re.escape(name)}.*CRC-64"):
        loaded(tmp_path, target, verify="full")
    if name != "note":
        loaded(tmp_path, target, verify="off")


def test_a_part_of_a_tensor_is_compared(tmp_path: Path) -> None:
    state = {"big": torch.randn(4000, 1000)}
    save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    (path,) = tmp_path.glob("shard-*.safetensors")
    damaged(tmp_path, "big", 9 << 20)
    for first, rows, is_found in ((0, 2000, False), (2000, 600, True), (2700, 1300, False), (0, 4000, True)):
        shard = Shard(path, None, "full")
        memory = torch.zeros(rows, 1000)
        shard.request("big", first * 4000, memory)
        shard.start()
        with deepnvme.Engine() as engine:
            engine.read_batch(shard.parts)
        if is_found:
            with pytest.raises(errors.ChecksumError) as caught:
                shard.finish()
            assert caught.value.offset is not None
        else:
            shard.finish()
            assert torch.equal(memory, state["big"][first : first + rows])
    with pytest.raises(errors.CorruptFileError, match="smaller"):
        shard.request("big", 4000, torch.zeros(4000, 1000))
    with pytest.raises(errors.CorruptFileError, match="other"):
        shard.dtype_and_shape("other")


def test_a_sample_of_chunks_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"big": torch.randn(40 << 18)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    (path,) = tmp_path.glob("shard-*.safetensors")
    asked: list[int] = []

    def counted(path: Any, offset: int, nbytes: int) -> int:
        asked.append(offset)
        return _crc64(path, offset, nbytes)

    monkeypatch.setattr(_dcp_shard, "_crc64", counted)
    for verify, count in (("off", 0), ("sample", 2), ("full", 39)):
        asked.clear()
        shard = Shard(path, None, verify)
        shard.request("big", 4, torch.zeros((39 << 18) - 4))
        shard.finish()
        assert len(set(asked)) == len(asked) == count


def test_full_verification_needs_checksums(tmp_path: Path) -> None:
    save(state_of(1), storage_writer=DeepnvmeWriter(tmp_path, checksums=False), no_dist=True)
    loaded(tmp_path, state_of(2))
    with pytest.raises(CheckpointException, match="no checksums"):
        loaded(tmp_path, state_of(2), verify="full")
    with pytest.raises(ValueError, match="verify"):
        DeepnvmeReader(tmp_path, verify="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("checksums", [True, False])
def test_tied_weights_of_an_untied_checkpoint(tmp_path: Path, checksums: bool) -> None:
    one, other = torch.randn(9, 400), torch.randn(9, 400)
    save({"a": one, "b": other}, storage_writer=DeepnvmeWriter(tmp_path, checksums=checksums), no_dist=True)
    tied, memory = torch.zeros(9, 400), torch.zeros(20, 400)
    with pytest.raises(CheckpointException, match=r"shares its memory with another tensor"):
        loaded(tmp_path, {"a": tied, "b": tied})
    with pytest.raises(CheckpointException, match="share a part of their memory"):
        loaded(tmp_path, {"a": memory[:9], "b": memory[5:14]})
    loaded(tmp_path, {"a": memory[:9], "b": memory[9:18]})
    assert torch.equal(memory[:18], torch.cat([one, other]))
    save({"a": one, "b": one.clone()}, storage_writer=DeepnvmeWriter(tmp_path, checksums=checksums), no_dist=True)
    assert torch.equal(loaded(tmp_path, {"a": tied, "b": tied})["b"], one)


def test_a_tensor_called_like_a_chunk_of_another(tmp_path: Path) -> None:
    names = ["a", "a@4,0", "a@4,0@", "a@4,0@4,0"]
    for place in ([4, 0], [0, 4, 0], None):
        taken: list[str] = []
        for name in [*names, *reversed(names)]:
            index = MetadataIndex(name, None if place is None else torch.Size(place))
            taken.append(_free_name(WriteItem(index, WriteItemType.TENSOR), taken))
        assert len({*taken}) == len(taken)


KILLED = """
import os, sys, torch
from torch.distributed.checkpoint.state_dict_saver import save
from deepnvme.integrations.dcp import DeepnvmeWriter
class Killed(DeepnvmeWriter):
    def finish(self, *_, **__):
        os.kill(os.getpid(), 9)
save({"a": torch.ones(5)}, storage_writer=Killed(sys.argv[1]), no_dist=True)
"""


def test_only_remains_of_a_killed_job_are_removed(tmp_path: Path) -> None:
    first = state_of(1)
    save(first, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    foreign = {f"shard-0000{rank}-{'0123abcd' * 4}.safetensors": b"foreign" for rank in range(3)}
    foreign[".shard-00001-0123abcd.safetensors.deepnvme-tmp-1-0"] = b"foreign"
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    before = len(list(tmp_path.iterdir()))
    assert status_of(KILLED, tmp_path) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == before + 2, "a shard, and the list of it"
    assert_same(loaded(tmp_path, state_of(3))["model"], first["model"])
    save(state_of(2), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    assert len(list(tmp_path.iterdir())) == before
    assert all((tmp_path / name).read_bytes() == data for name, data in foreign.items())


def test_a_replaced_shard_is_kept(tmp_path: Path) -> None:
    save(state_of(1), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    (shard,) = tmp_path.glob("shard-*")
    shard.unlink()
    shard.write_text("mine")
    save(state_of(2), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    assert shard.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_copied_folder_owns_only_its_own(tmp_path: Path) -> None:
    save(state_of(1), storage_writer=DeepnvmeWriter(tmp_path / "one"), no_dist=True)
    (tmp_path / "one").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    for name, left in (("moved", 2), ("copy", 3)):
        save(state_of(2), storage_writer=DeepnvmeWriter(tmp_path / name), no_dist=True)
        assert len(list((tmp_path / name).iterdir())) == left
        assert loaded(tmp_path / name, state_of(3), verify="full")["step"] == 2


def test_no_rank_creates_an_unlisted_file(tmp_path: Path) -> None:
    class Late(DeepnvmeWriter):
        def write_data(self, *arguments: Any) -> Any:
            # The coordinator gave up, as after an error of another rank.
            self.give_up()
            return super().write_data(*arguments)

    with pytest.raises(CheckpointException, match=r"shard-00000-.*all ranks share"):
        save(state_of(1), storage_writer=Late(tmp_path), no_dist=True)
    assert not list(tmp_path.iterdir())


def test_plans_and_ranks_that_name_no_files_are_refused(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save({"a": torch.ones(3)}, storage_writer=DeepnvmeWriter(tmp_path), planner=planner, no_dist=True)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        save({"a": torch.ones(3)}, storage_writer=DeepnvmeWriter(tmp_path), planner=planner, no_dist=True)
    with pytest.raises(errors.UnsupportedError, match="use_collectives"):
        DeepnvmeWriter(tmp_path).set_up_storage_writer(True, rank=1, use_collectives=False)
    assert len(list(tmp_path.iterdir())) == 2


RANK = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
action, folder, rendezvous, rank, world = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
def state(seed):
    torch.manual_seed(seed)
    full = {"rows": torch.randn(37, 8), "columns": torch.randn(6, 50), "same": torch.randn(11)}
    full["bf16"] = torch.randn(64, 3).bfloat16()
    full["rows@19,0"] = torch.randn(37, 8)
    full["rows@19,0@19,0"] = torch.randn(5)
    placed = {"rows@19,0": Shard(0), "rows@19,0@19,0": Replicate()}
    placed |= {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "bf16": Shard(0)}
    sharded = {name: distribute_tensor(tensor, mesh, [placed[name]]) for name, tensor in full.items()}
    return full, {**sharded, "step": seed}
full, sharded = state(5)
if action == "save":
    dcp.save(sharded, storage_writer=DeepnvmeWriter(folder))
elif action == "async":
    dcp.async_save(sharded, storage_writer=DeepnvmeWriter(folder)).result()
elif action == "alone":
    try:
        dcp.save(state(7)[1], storage_writer=DeepnvmeWriter(folder), use_collectives=False)
    except Exception as error:
        assert "use_collectives=True" in str(error), error
    else:
        raise AssertionError("each rank has replaced the checkpoint by its own part")
else:
    _, other = state(6)
    dcp.load(other, storage_reader=DeepnvmeReader(folder, verify="full"))
    assert other["step"] == 5
    for name, tensor in full.items():
        assert torch.equal(other[name].full_tensor(), tensor), name
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
# A process of gloo now and then ends with std::terminate after its last line; what is tested is over by then.
os._exit(0)
"""


def run(action: str, folder: Path, world: int, tmp_path: Path) -> None:
    rendezvous = tmp_path / f"rendezvous-{action}-{world}"
    with ExitStack() as stack:
        ranks = [stack.enter_context(program(RANK, action, folder, rendezvous, rank, world)) for rank in range(world)]
        assert [rank.wait() for rank in ranks] == [0] * world


def test_ranks_that_save_alone_leave_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run("save", folder, 2, tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    run("alone", folder, 2, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == before
    run("load", folder, 1, tmp_path)


@pytest.mark.parametrize("action", ["save", "async"])
def test_several_processes_and_another_number_of_them(tmp_path: Path, action: str) -> None:
    folder = tmp_path / "checkpoint"
    run(action, folder, 2, tmp_path)
    assert len(list(folder.glob("shard-*.safetensors"))) == 2
    for world in (1, 2, 3) if action == "save" else (2,):
        run("load", folder, world, tmp_path)


def _entry(size: list[int], chunks: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    listed = [
        [offsets, sizes, [f"shard-00000-{32 * 'a'}.safetensors", str(at)]] for at, (offsets, sizes) in enumerate(chunks)
    ]
    entry = {"dtype": "float32", "size": size, "requires_grad": False, "chunks": listed}
    return {"version": 1, "entries": {"a": entry}, "planner_data": None}


def _cut(rng: random.Random, offsets: list[int], sizes: list[int]) -> list[tuple[list[int], list[int]]]:
    """Cut a box into boxes at random."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or rng.random() < 0.2:
        return [(offsets, sizes)]
    dim = rng.choice(dims)
    first = rng.randrange(1, sizes[dim])
    second_offsets, second_sizes, first_sizes = [*offsets], [*sizes], [*sizes]
    first_sizes[dim], second_sizes[dim] = first, sizes[dim] - first
    second_offsets[dim] += first
    return _cut(rng, offsets, first_sizes) + _cut(rng, second_offsets, second_sizes)


def test_chunks_of_a_list_cover_their_tensor_once() -> None:
    """Chunks that overlap leave other elements out, though their sizes add up."""
    rng = random.Random(5)
    moved = 0
    for _ in range(300):
        size = [rng.randrange(1, 7) for _ in range(rng.randrange(1, 4))]
        chunks = _cut(rng, [0] * len(size), size)
        rng.shuffle(chunks)
        entry: Any = _dcp_index.decode(_entry(size, chunks)).state_dict_metadata["a"]
        assert len(entry.chunks) == len(chunks)
        at, dim = rng.randrange(len(chunks)), rng.randrange(len(size))
        offsets, sizes = [*chunks[at][0]], chunks[at][1]
        offsets[dim] = rng.randrange(size[dim] - sizes[dim] + 1)
        if offsets != chunks[at][0]:
            moved += 1
            chunks[at] = offsets, sizes
            with pytest.raises(ValueError, match=r"overlap, or do not cover it|listed twice"):
                _dcp_index.decode(_entry(size, chunks))
    assert moved > 100


@st.composite
def nested_states(draw: st.DrawFn) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Draw two states of one structure and different values."""
    keys = st.one_of(st.integers(-3, 12), st.sampled_from(["a", "b", "0x", "weight"]), st.booleans())
    numbers = iter(range(1 << 20))

    def node(depth: int) -> tuple[Any, Any]:
        kinds = ["tensor", "number", "text"] + (["list"] + ["dict"] * 3) * (depth > 0)
        match draw(st.sampled_from(kinds)):
            case "tensor":
                return torch.full((3,), float(next(numbers))), torch.full((3,), float(next(numbers)))
            case "number":
                return next(numbers) + 0.5, next(numbers) + 0.5
            case "text":
                return f"text {next(numbers)}", f"text {next(numbers)}"
            case "list":
                pairs = [node(depth - 1) for _ in range(draw(st.integers(1, 3)))]
                return [one for one, _ in pairs], [other for _, other in pairs]
        names = draw(st.lists(keys, min_size=1, max_size=4, unique_by=(str, lambda key: key)))
        below = {name: node(depth - 1) for name in names}
        return {name: pair[0] for name, pair in below.items()}, {name: pair[1] for name, pair in below.items()}

    top = {f"part{number}": node(3) for number in range(draw(st.integers(1, 3)))}
    return {name: pair[0] for name, pair in top.items()}, {name: pair[1] for name, pair in top.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=nested_states())
def test_values_return_under_the_keys_that_they_had(tmp_path: Path, pair: Any) -> None:
    saved, into = pair
    save(saved, storage_writer=DeepnvmeWriter(tmp_path / "c", durability="none"), no_dist=True)
    load(into, storage_reader=DeepnvmeReader(tmp_path / "c"), no_dist=True)
    assert_same(into, saved)


def test_values_that_a_load_refuses_are_named_when_they_are_saved(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3), "options": Namespace(a=1)}
    with pytest.warns(UserWarning, match=r"\['options'\] needs .*Namespace"):
        save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*single process")
        save({**state, "options": {"a": 1}}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)


def test_a_reader_of_a_replaced_checkpoint_says_so(tmp_path: Path) -> None:
    save(state_of(1), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)

    class Late(DeepnvmeReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(state_of(2), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
            return super().read_data(plan, planner)

    with pytest.raises(CheckpointException) as caught:
        load(state_of(3), storage_reader=Late(tmp_path), no_dist=True)
    (failure, _) = caught.value.failures[0]
    assert type(failure) is errors.Error
    assert f"{tmp_path}: the checkpoint was replaced while it was read; load it again" in str(failure)


def test_targets_and_names_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    save({"a": torch.ones(4)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException, match="a has elements that share their memory"):
        load({"a": torch.zeros(1).expand(4)}, storage_reader=DeepnvmeReader(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException, match="rename this tensor"):
        save({"__metadata__": torch.ones(4)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)


@pytest.mark.parametrize("kind", ["large", "deep list", "deep dict"])
def test_values_that_no_load_returns_are_refused_and_the_old_checkpoint_stays(tmp_path: Path, kind: str) -> None:
    def nested(leaf: Any, depth: int, wrap: Callable[[Any], Any]) -> Any:
        for _ in range(depth):
            leaf = wrap(leaf)
        return leaf

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "large": lambda: {"o": bytes(257 << 20)},
        "deep list": lambda: {"o": nested(1, 600, lambda value: [value])},
        "deep dict": lambda: {"o": nested(torch.ones(3), 510, lambda value: {"k": value})},
    }
    old = {"w": torch.randn(10)}
    save(old, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException, match="the state cannot be saved so that it could be loaded"):
        save(made[kind](), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    assert torch.equal(loaded(tmp_path, {"w": torch.zeros(10)})["w"], old["w"])


def test_a_save_that_fails_leaves_no_files(tmp_path: Path) -> None:
    class Refuses(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise ValueError(write_item.index.fqn)

    state = {"a": torch.ones(5)}
    save(state, storage_writer=DeepnvmeWriter(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    failures = []
    for _ in range(3):
        with pytest.raises(CheckpointException) as caught:
            save(state, storage_writer=DeepnvmeWriter(tmp_path), planner=Refuses())
        # A notebook keeps the last one, and with it the writer.
        failures.append(caught)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
