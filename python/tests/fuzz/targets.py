"""Parsers in Python over arbitrary bytes, for ``scripts/fuzz_python.py``; ``test_targets.py`` runs their seeds.

Each body gives an input to a reader, and checks that it returns sound objects or raises a typed error, and that it runs
nothing and touches no other file.
"""

from __future__ import annotations

import collections
import contextlib
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

import deepnvme
from attacked_readers import load_distributed, zipped
from deepnvme import errors
from deepnvme._checkpoint.dcp import index, shard
from deepnvme._checkpoint.dcp import reader as dcp_reader
from deepnvme._checkpoint.dcp.values import repickle_safely
from deepnvme._checkpoint.safe_unpickler import _EnumMember, loadable_globals
from mutators import same
from small_optimizer import small_optimizer, stepped_optimizer

from .reading import read, safetensors_file
from .row_targets import packed_table, trace
from .watch import Watch

Body: TypeAlias = Callable[[bytes], None]
SHARD = "shard-00000-" + "0123456789abcdef" * 2 + ".safetensors"
_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.device, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.OrderedDict, collections.Counter)
# Takes the place of `getattr` for files.
_GETATTR = (_EnumMember,)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.TypedStorage, torch.layout, torch.qscheme)


def check_objects(found: object) -> None:
    """Check that only types and globals that no setting needs to allow were made."""
    allowed, seen, waiting = loadable_globals(), set(), [found]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind: type = type(one)
        is_known = kind in _SCALARS + _CONTAINERS + _TENSORS + _GETATTR or id(one) in allowed
        assert is_known or kind.__module__.startswith(("deepnvme._checkpoint.lazy", "torch")), kind
        if isinstance(one, dict):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            waiting.extend(one)
        if kind in (collections.OrderedDict, torch.Tensor, torch.nn.Parameter):
            waiting.append(vars(one))


def objects(folder: Path, watch: Watch) -> Body:
    """Objects of a pickle. The first byte chooses the way to load it."""
    path = folder / "x.pt"
    state = {"a": torch.arange(4.0), "p": torch.nn.Parameter(torch.ones(2, 3)), "s": {1}, "t": (1, None)}
    torch.save(state, path)
    with zipfile.ZipFile(path) as file:
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    ways: list[Callable[[bytes], object]] = [
        lambda _: deepnvme.load(path),
        lambda _: deepnvme.load(path, lazy=True),
        lambda _: deepnvme.load(path, only="a"),
        lambda _: deepnvme.load(path, into={"a": torch.empty(4)}),
        lambda whole: torch.load(repickle_safely(whole, path, "value", None), weights_only=False),
    ]

    def body(data: bytes) -> None:
        whole = zipped({**records, "data.pkl": data[1:]})
        path.write_bytes(whole)
        # The changed file may lack the tensor that is asked for.
        with contextlib.suppress(KeyError):
            check_objects(read(watch, path, lambda: ways[data[0] % len(ways) if data else 0](whole)))

    return body


def distributed(folder: Path, watch: Watch) -> Body:
    """Entries of ``deepnvme.json``, and a load by it. A text with fingerprints counts as one with its checksum."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

    wanted: dict[str, Any] = {"a": torch.full((4, 3), 1.0), "n": {"b": torch.ones(2, 2), "cfg": "value"}}
    save(wanted, storage_writer=DeepnvmeWriter(folder), no_dist=True)
    (old,) = folder.glob("shard-*")
    old.rename(folder / SHARD)
    path, engine = folder / index.INDEX_NAME, deepnvme.Engine(workers=1)
    # A change would not match the checksum, and so end the load at once.
    setattr(dcp_reader, "_list_state", lambda text: "sealed" if b'"deepnvme.files"' in text else "unsealed")  # noqa: B010
    (folder / "index").write_text(path.read_text().replace(old.name, SHARD))

    def body(data: bytes) -> None:
        path.write_bytes(data)
        metadata: Any = read(watch, folder, lambda: DeepnvmeReader(folder, engine=engine).read_metadata())
        if metadata is None:
            return
        again = index.decode(json.loads(json.dumps(index.encode(metadata, metadata.storage_data))))
        assert again == metadata
        assert all(index.SHARD_NAME.fullmatch(one.file) for one in metadata.storage_data.values())
        state = {"a": torch.zeros(4, 3), "n": {"b": torch.zeros(2, 2), "cfg": ""}}
        reader = DeepnvmeReader(folder, engine=engine)
        loaded: Any = read(watch, folder, lambda: load_distributed(folder, reader, state))
        # An index without a checksum may exchange values.
        if loaded is not None:
            loaded["n"]["cfg"] = wanted["n"]["cfg"]
            assert same(loaded, wanted)

    return body


def shard_checksums(folder: Path, watch: Watch) -> Body:
    """Checksums of a shard, of which parts are read."""
    path, engine = folder / SHARD, deepnvme.Engine(workers=1)
    tensor = {"dtype": "F32", "shape": [1 << 18], "data_offsets": [0, 1 << 20]}
    content = bytes(1 << 20)

    def body(data: bytes) -> None:
        text = data.decode(errors="replace")
        path.write_bytes(safetensors_file({"__metadata__": {"deepnvme.checksums": text}, "a": tensor}, content))
        target = torch.ones(1000)

        def load() -> torch.Tensor:
            one = shard.Shard(path, engine, "full")
            one.request("a", 4096, target)
            one.start()
            engine.read_batch(one.parts)
            one.finish()
            return target

        # Without checksums, nothing can be compared; the error tells the caller to ask for something else.
        with contextlib.suppress(ValueError):
            loaded: Any = read(watch, path, load)
            assert loaded is None or not loaded.any()

    return body


def optimizer_state(folder: Path, watch: Watch) -> Body:
    """The header of a file of optimizer state."""
    mine, his = stepped_optimizer(folder), small_optimizer(folder)
    path = folder / "state"
    mine.save_state(path, checksums=False)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, content = json.loads(whole[8:end]), whole[end:]
    kinds = mine.state_dict()["state"][0].keys()
    (folder / "description").write_text(header["__metadata__"]["deepnvme.optimizer"])

    def body(data: bytes) -> None:
        header["__metadata__"]["deepnvme.optimizer"] = data.decode(errors="replace")
        path.write_bytes(safetensors_file(header, content))
        if read(watch, path, lambda: his.load_state(path) or True):
            state = his.state_dict()["state"]
            # Either all of a parameter's state, or none of it.
            assert state.keys() == {0, 1}
            assert all(one.keys() == kinds for one in state.values())

    return body


def checkpoints(folder: Path, watch: Watch) -> Body:
    """``manifest.json`` of a ``Checkpointer``, as it lists and restores checkpoints."""
    state = {"a": torch.arange(30.0)}
    with deepnvme.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
    saved = {path: path.read_bytes() for path in folder.iterdir()}
    shutil.copy(folder / "manifest.json", folder / "manifest")

    def load() -> object:
        with contextlib.suppress(errors.NotFoundError), deepnvme.Checkpointer(folder) as checkpointer:
            for checkpoint in checkpointer.checkpoints:
                assert checkpoint.path.parent == folder
                with contextlib.suppress(errors.Error):
                    checkpoint.check()
            return checkpointer.latest() and checkpointer.restore(verify="full")
        return None

    def body(data: bytes) -> None:
        for path, content in saved.items():
            if not path.exists():
                path.write_bytes(content)
        (folder / "manifest.json").write_bytes(data)
        loaded = read(watch, folder, load)
        assert loaded is None or same(loaded, state)

    return body


def model_config(folder: Path, watch: Watch) -> Body:
    """``config.json`` of a model that is streamed."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=32)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path, engine = folder / "config.json", deepnvme.Engine(workers=1)
    shutil.copy(path, folder / "config")

    def body(data: bytes) -> None:
        path.write_bytes(data)

        def load() -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                deepnvme.stream(folder, memory="4MB", engine=engine).streaming.close()
            return None

        # An implementation that is not installed, or a model whose code needs another package.
        with contextlib.suppress(ImportError):
            read(watch, folder, load)

    return body


TARGETS: dict[str, Callable[[Path, Watch], Body]] = {
    "objects": objects,
    "distributed": distributed,
    "shard_checksums": shard_checksums,
    "optimizer_state": optimizer_state,
    "checkpoints": checkpoints,
    "model_config": model_config,
    "packed_table": packed_table,
    "trace": trace,
}
