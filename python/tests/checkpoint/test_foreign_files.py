"""A folder full of foreign files with every name that deepnvme uses: each operation leaves every byte of them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import deepnvme
from deepnvme import errors, optim
from deepnvme._deepnvme import _run_command
from deepnvme._swap import Swapper
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
from ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

TOKEN = "0123456789abcdef" * 2
# Suffixes of private names, also of earlier versions.
ENDS = ("1-0", "1f-0-0123456789abcdef", "1f-17f3a2b1c4d5e6f7-0123456789abcdef", f"new-{TOKEN}", TOKEN, "0123456789ab")
# Names of files in the operations below.
TARGETS = ("state", "deepnvme.json", "manifest.json", "model.pt", "model.safetensors", "packed.safetensors",
    "set.pt.stripes.json", "step-00000001", "step-00000002.pt", "shard-00000", f"shard-00000-{TOKEN}.safetensors",
    "latest", "")  # fmt: skip
SHARDS = [f"shard-{rank:05}-{token}.safetensors" for rank in (0, 1) for token in (TOKEN, "01234567", "f" * 32)]
FILES = [
    *(f".{target}.deepnvme-tmp-{end}" for target in TARGETS for end in ENDS),
    *(f"{target}.part-{TOKEN}" for target in ("a.pt", "b.pt", "packed.packed.safetensors")),
    *SHARDS, ".deepnvme-contents", ".deepnvme-swap-1f-0-0123456789abcdef", f".deepnvme-swap-{TOKEN}",
    ".deepnvme-swap-1-0", "step-00000077.pt", "step-00000077.pt.part-00-of-02", "step-00000077.pt.stripes.json",
    "model-00001-of-00002.safetensors", f"model-00001-of-00002-{TOKEN}.safetensors", "state.tmp", "latest.tmp",
]  # fmt: skip
FOLDERS = [
    "step-00000078",
    *(f".{name}.deepnvme-tmp-{end}" for name in ("step-00000079", "packed") for end in ENDS[:3]),
]


class Foreign:
    """Foreign files in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        # The contents of a list of a killed save, for foreign files.
        intent = {"format": "deepnvme-intent", "version": 1, "members": [*SHARDS, "state.tmp"]}
        self._contents: dict[str, bytes] = {}
        for name in [*FILES, *(f"{inner}/{name}" for inner in FOLDERS for name in (".deepnvme-contents", *SHARDS))]:
            text = json.dumps(intent) if "deepnvme-tmp" in name else "\0".join([*SHARDS, ""])
            self._contents[name] = text.encode() if name.startswith(".") else f"foreign {name}".encode()
        for inner in FOLDERS:
            (folder / inner).mkdir()
        for name, content in self._contents.items():
            (folder / name).write_bytes(content)

    def check(self) -> None:
        """Compare them."""
        for name, content in self._contents.items():
            assert (self._folder / name).read_bytes() == content, name

    def others(self) -> set[str]:
        """Name the other files."""
        return {path.name for path in self._folder.iterdir()} - {*FILES, *FOLDERS}


def save_files(folder: Path, check: Callable[[], None]) -> set[str]:
    disks = deepnvme.StripeSet([folder / "set.pt", folder / "b.pt"], stripe_bytes=4096)
    for seed in range(2):
        state = {"a": torch.randn(5000), "seed": torch.tensor(seed)}
        for path in (folder / "model.pt", folder / "model.safetensors", disks):
            deepnvme.save(state, path)
            check()
        with pytest.raises(TypeError):
            deepnvme.save({"a": 1}, folder / "model.safetensors")
        with pytest.raises(RuntimeError), deepnvme.open(folder / "state", "wb") as out:
            out.write(b"half")
            raise RuntimeError
        check()
    parts = {Path(path).name for path in deepnvme.StripeSet.from_manifest(disks.manifest_path).paths}
    return {"model.pt", "model.safetensors", Path(disks.manifest_path).name, *parts}


def save_distributed(folder: Path, check: Callable[[], None]) -> set[str]:
    class Broken(DeepnvmeWriter):
        def finish(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("the coordinator died")

    for seed in range(2):
        state = {"a": torch.full((700,), float(seed)), "note": "text"}
        dcp_save(state, storage_writer=DeepnvmeWriter(folder), no_dist=True)
        check()
        broken = Broken(folder)
        with pytest.raises(CheckpointException, match="died"):
            dcp_save(state, storage_writer=broken, no_dist=True)
        broken.give_up()
        check()
        target: dict[str, Any] = {"a": torch.zeros(700), "note": ""}
        dcp_load(target, storage_reader=DeepnvmeReader(folder, verify="full"), no_dist=True)
        assert target["a"][0] == seed
    shards = json.loads((folder / "deepnvme.json").read_text())["deepnvme.files"]
    return {"deepnvme.json", *shards}


CHECKPOINTS = """
import warnings
warnings.simplefilter("ignore")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world,))
def state_of(step, sharded):
    tensor = torch.full((80, 30), float(step))
    return {"a": distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor, "step": step}
with Checkpointer(folder, keep=1) as checkpointer:
    for step in range(1, 5):
        checkpointer.save(step, state_of(step, step % 2))
        if step == 1 and rank == 0:
            # Retention finds somebody else's file in the place of a shard.
            shard = min((folder / "step-00000001").glob("shard-*"))
            shard.unlink()
            shard.write_text("mine")
    try:
        # Of a state that differs nothing is left.
        checkpointer.save(5, {"a": torch.ones(3 + rank)})
    except errors.Error as error:
        answer = str(error)
with Checkpointer(folder, keep=1) as checkpointer:
    checkpointer.save(7, state_of(7, True))
    restored = checkpointer.restore(into=state_of(0, True), verify="full")
    assert restored["step"] == 7
"""


def save_checkpoints(folder: Path, check: Callable[[], None]) -> set[str]:
    answers = run(CHECKPOINTS, 2, folder)
    assert all("on rank 1, and" in str(answer) for answer in answers), answers
    check()
    (replaced,) = (folder / "step-00000001").iterdir()
    assert replaced.read_text() == "mine"
    return {"manifest.json", "step-00000001", "step-00000007"}


def save_optimizer(folder: Path, check: Callable[[], None]) -> set[str]:
    params = [nn.Parameter(torch.randn(count)) for count in (3000, 7)]
    optimizer = optim.AdamW(params, lr=1e-3, swap_dir=folder, memory="64KiB")
    real = Swapper.export

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        optimizer.save_state(folder / "state")
        check()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Swapper, "export", refuse)
            with pytest.raises(errors.Error, match="Input/output"):
                optimizer.save_state(folder / "state")
        check()
    assert Swapper.export is real
    optimizer.load_state(folder / "state", verify="full")
    optimizer.close()
    return {"state"}


def swap(folder: Path, check: Callable[[], None]) -> set[str]:
    for named in (False, True):
        for folders in ([folder], [folder, folder]):
            with suppress(errors.InvalidArgumentError), Swapper(folders, memory="1MB", named=named) as swapper:
                for key in range(5):
                    swapper.put(str(key), torch.randn(90_000))
                swapper.flush()
                swapper.delete("3")
                with pytest.raises(MemoryError):
                    swapper.put("large", torch.zeros(1 << 20))
                check()
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=folder)
    model(torch.randn(2, 60)).sum().backward()
    check()
    offloading.close()
    return set()


def pack(folder: Path, check: Callable[[], None]) -> set[str]:
    source = folder.parent / "source"
    source.mkdir()
    save_file({"layers.0.w": torch.randn(256, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    assert _run_command(["pack", str(source), str(folder / "packed"), "--dtype", "lossless"]) == 0
    check()
    for other in ("packed", "state.tmp", "step-00000078"):
        assert _run_command(["pack", str(source), str(folder / other), "--dtype", "lossless"]) == 1
        check()
    disks = [folder, folder.parent / "other"]
    disks[1].mkdir()
    striped = ["--dtype", "lossless", "--disks", *map(str, disks)]
    assert _run_command(["pack", str(source), str(folder.parent / "striped"), *striped]) == 0
    check()
    assert _run_command(["pack", str(folder / "nothing"), str(folder / "none"), *striped]) == 1
    manifest = folder.parent / "striped" / "packed.safetensors.stripes.json"
    parts = [Path(path) for path in deepnvme.StripeSet.from_manifest(manifest).paths]
    return {"packed", *(part.name for part in parts if part.parent == folder)}


OPERATIONS = [save_files, save_distributed, save_checkpoints, save_optimizer, swap, pack]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: str(operation.__name__))
def test_foreign_files_keep_every_byte(tmp_path: Path, operation: Callable[..., set[str]]) -> None:
    folder = tmp_path / "c"
    foreign = Foreign(folder)
    left = operation(folder, foreign.check)
    foreign.check()
    assert foreign.others() == left
