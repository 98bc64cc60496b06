"""Thousands of hostile inputs for one reader, in one limited process. Run by ``test_mutations.py``.

Each input gives the saved state, or an error of ``deepnvme.errors`` that names the file. Twenty take less than ten
seconds. Together they add less than 1 GiB of address space to that of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepnvme
from attacked_readers import load_distributed, zipped
from deepnvme import errors
from deepnvme.integrations.dcp import DeepnvmeReader
from mutators import NUMBERS, Target, as_text, mutate_json, mutate_pickle, same

from .hostile_states import STATES

BYTES_MAX = 1 << 30
SECONDS_MAX, INPUTS_TIMED = 10, 20


def archive_pickle(folder: Path) -> Target:
    """Changed pickles in a torch archive with correct checksums."""
    path = folder / "x.pt"
    state = {
        "a": torch.randn(4),
        "p": torch.nn.Parameter(torch.randn(2, 3)),
        "n": {"s": {1, 2}, "t": (1, None)},
        "l": [2.5],
    }
    torch.save(state, path)
    with zipfile.ZipFile(path) as file:
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}

    def write(dice: random.Random) -> None:
        data = records["data.pkl"]
        for _ in range(dice.randrange(1, 4)):
            data = mutate_pickle(data, dice)
        path.write_bytes(zipped({**records, "data.pkl": data}))

    ways: list[Callable[[], object]] = [
        lambda: deepnvme.load(path),
        lambda: deepnvme.load(path, lazy=True),
        lambda: deepnvme.load(path, only="a"),
        lambda: deepnvme.load(path, into={"a": torch.empty(4)}),
    ]
    turn = iter(range(10**9))

    def load() -> object:
        with contextlib.suppress(KeyError):
            # The changed file lacks this tensor.
            return ways[next(turn) % len(ways)]()
        return None

    # Without a checksum, the pickle may contain anything.
    return path, write, load, lambda _: True


def sealed(folder: Path, suffix: str) -> Target:
    """Files of deepnvme with random byte ranges changed."""
    path = folder / f"x.{suffix}"
    state = {"a": torch.randn(30), "b": torch.randint(0, 9, (2, 3)), "c": torch.empty(0)}
    deepnvme.save(state, path)
    whole = path.read_bytes()

    def write(dice: random.Random) -> None:
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(data) or 1)
            end = at + dice.randrange(1, 64)
            way = dice.randrange(6)
            if way == 0:
                data[at : at + 8] = struct.pack("<q", dice.choice([0, 1, -1, 1 << 40, len(whole)]))
            elif way == 1:
                del data[at:]
            elif way == 2:
                data[at:end] = data[at:end] * 2
            elif way == 3:
                other = dice.randrange(len(data) or 1)
                data[at:end] = data[other : other + end - at]
            elif way == 4:
                del data[at:end]
            elif at < len(data):
                data[at] ^= 1 << dice.randrange(8)
        path.write_bytes(data)

    return path, write, lambda: deepnvme.load(path, verify="full"), lambda loaded: same(loaded, state)


def safetensors(folder: Path) -> Target:
    """Changed headers of a safetensors file with checksums."""
    path = folder / "x.safetensors"
    state = {"a": torch.randn(30), "b": torch.randint(0, 9, (2, 3)), "c": torch.empty(0)}
    deepnvme.save(state, path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def write(dice: random.Random) -> None:
        text = as_text(mutate_json(header, dice), dice)
        text = text.ljust(-(-len(text) // 8) * 8)
        said = dice.choice([len(text)] * 8 + [len(text) - 1, 1 << 40, 0])
        path.write_bytes(struct.pack("<Q", said) + text + data)

    return path, write, lambda: deepnvme.load(path, verify="full"), lambda loaded: same(loaded, state)


def index(folder: Path) -> Target:
    """Changed indexes of a sharded model, with and without the checksum."""
    state = {str(number): torch.randn(100) for number in range(3)}
    deepnvme.save(state, folder / "model.safetensors", max_shard_bytes=500)
    path = folder / "model.safetensors.index.json"
    sealed = json.loads(path.read_text())
    plain = {**sealed, "metadata": {"total_size": sealed["metadata"]["total_size"]}}
    turn = [0]

    def write(dice: random.Random) -> None:
        turn[0] += 1
        path.write_bytes(as_text(mutate_json(plain if turn[0] % 2 else sealed, dice), dice))

    def fits(loaded: object) -> bool:
        if turn[0] % 2 == 0:
            return same(loaded, state)
        # Nothing tells an index of another program, which may list some tensors of its files, from a shortened one.
        return isinstance(loaded, dict) and all(same(value, state[name]) for name, value in loaded.items())

    return folder, write, lambda: deepnvme.load(folder, verify="full"), fits


def history(folder: Path) -> Target:
    """Changed manifests of a Checkpointer."""
    states = {step: {"a": torch.randn(30), "step": step} for step in (1, 2)}
    with deepnvme.Checkpointer(folder) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state)
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document["checkpoints"][0]["parts"] = [
        {"file": "step-00000001.pt", "nbytes": 1, "host": "h", "head_crc64": "0" * 16}
    ]

    def write(dice: random.Random) -> None:
        path.write_bytes(as_text(mutate_json(document, dice), dice))

    def load() -> object:
        with contextlib.suppress(errors.NotFoundError), deepnvme.Checkpointer(folder) as checkpointer:
            for checkpoint in checkpointer.checkpoints:
                with contextlib.suppress(errors.Error):
                    checkpoint.check()
            latest = checkpointer.latest()
            return latest and checkpointer.restore(verify="full")
        return None

    return folder, write, load, lambda loaded: loaded is None or any(same(loaded, state) for state in states.values())


def stripes(folder: Path) -> Target:
    """Changed lists of a file in parts."""
    parts = [folder / "a.pt", folder / "b.pt"]
    state = {"a": torch.randn(3000)}
    made = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.save(state, made)
    path = Path(made.manifest_path)
    # Like a handwritten list: its checksum would reject nearly all changes.
    document = {**json.loads(path.read_text()), "version": 1}
    del document["deepnvme.checksum"]
    path.write_text(json.dumps(document))

    def write(dice: random.Random) -> None:
        path.write_bytes(as_text(mutate_json(document, dice), dice))

    def load() -> object:
        return deepnvme.load(deepnvme.StripeSet.from_manifest(path), verify="full")

    return folder, write, load, lambda loaded: same(loaded, state)


def flip(data: bytearray, begin: int, end: int, dice: random.Random) -> None:
    """Change some bytes between two places."""
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(begin, end)
        data[at] = dice.choice([0, 1, 127, 128, 255, data[at] ^ 1 << dice.randrange(8)])


def distributed(folder: Path) -> Target:
    """Changed distributed checkpoints: the index with and without a checksum, a shard, and a value in a shard."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from deepnvme.integrations.dcp import DeepnvmeWriter

    def state_of(number: float) -> dict[str, Any]:
        return {"a": torch.full((3,), number), "n": {"b": torch.full((2, 2), number), "cfg": f"value {number}"}}

    wanted = state_of(1.0)
    for checksums in (True, False):
        save(wanted, storage_writer=DeepnvmeWriter(folder / str(checksums), checksums=checksums), no_dist=True)
    index, plain_index = folder / "True/deepnvme.json", folder / "False/deepnvme.json"
    (shard,), (plain_shard,) = (list((folder / name).glob("shard-*")) for name in ("True", "False"))
    wholes = {path: path.read_bytes() for path in (index, plain_index, shard, plain_shard)}
    sealed = json.loads(wholes[index])
    unsealed = {key: value for key, value in json.loads(wholes[plain_index]).items() if not key.startswith("deepnvme.")}
    wholes[plain_index] = json.dumps(unsealed).encode()
    plain_index.write_bytes(wholes[plain_index])
    header_bytes = 8 + int.from_bytes(wholes[plain_shard][:8], "little")
    start, end = json.loads(wholes[plain_shard][8:header_bytes])["n.cfg"]["data_offsets"]
    engine = deepnvme.Engine(workers=1)
    changed = [index]
    turn = iter(range(10**9))

    def write(dice: random.Random) -> None:
        changed[0].write_bytes(wholes[changed[0]])
        changed[0] = [plain_index, index, plain_index, shard, plain_index, plain_shard][next(turn) % 6]
        if changed[0] in (index, plain_index):
            document = sealed if changed[0] == index else unsealed
            changed[0].write_bytes(as_text(mutate_json(document, dice), dice))
            return
        data = bytearray(wholes[changed[0]])
        if changed[0] == shard:
            flip(data, 0, len(data), dice)
        else:
            flip(data, header_bytes + start, header_bytes + end, dice)
        changed[0].write_bytes(data)

    def load() -> object:
        reader = DeepnvmeReader(changed[0].parent, engine=engine, verify="full" if changed[0] == shard else "auto")
        return load_distributed(folder, reader, state_of(0.0))

    def fits(loaded: Any) -> bool:
        if loaded is None:
            # The error says which tensor the changed index lacks.
            return changed[0] == plain_index
        if changed[0] == plain_shard:
            # Without a checksum, the pickle may contain anything.
            loaded["n"]["cfg"] = wanted["n"]["cfg"]
        return same(loaded, wanted)

    return folder, write, load, fits


def settings(folder: Path) -> Target:
    """Changed files of engine settings."""
    path = folder / "deepnvme.toml"
    pieces = ["workers = 1\n", "queue_depth = 4\n", 'backend = "threads"\n', 'direct = "disabled"\n',
              "block_bytes = 65536\n", "[engine]\n", "[[folder]]\n", 'path = "/x"\n',
              "read = { workers = 2 }\n"]  # fmt: skip
    sound = "".join(pieces[5:6] + pieces[:5] + pieces[6:])
    path.write_text(sound)

    def write(dice: random.Random) -> None:
        lines = sound.splitlines(keepends=True)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(lines) or 1)
            number = str(dice.choice(NUMBERS))
            way = dice.randrange(6)
            if way == 0:
                lines.insert(at, dice.choice(pieces))
            elif way == 1:
                del lines[at : at + 1]
            elif way == 2:
                lines[at : at + 1] = [line.partition("=")[0] + f"= {number}\n" for line in lines[at : at + 1]]
            elif way == 3:
                lines[at : at + 1] = [line.replace('"', dice.choice(["'", "", '"x'])) for line in lines[at : at + 1]]
            elif way == 4:
                lines[at : at + 1] = [
                    line.replace(" =", dice.choice(["x =", ".x =", "", " = ["])) for line in lines[at : at + 1]
                ]
            else:
                lines[at : at + 1] = [line[: dice.randrange(len(line) + 1)] for line in lines[at : at + 1]]
        path.write_text("".join(lines))

    def load() -> object:
        engine = deepnvme.Engine.from_file(path)
        engine.close()
        return engine

    return path, write, load, lambda _: True


READERS: dict[str, Callable[..., Target]] = {
    "pickle": archive_pickle,
    "archive": lambda folder: sealed(folder, "pt"),
    "safetensors": safetensors,
    "index": index,
    "history": history,
    "stripes": stripes,
    "distributed": distributed,
    "settings": settings,
    **STATES,
}


def limit_time(number: int) -> None:
    """Begin the time of the next inputs. Not at each, since each call starts a thread."""
    if number % INPUTS_TIMED == 0:
        faulthandler.dump_traceback_later(SECONDS_MAX, exit=True)


def attack(name: str, folder: Path, count: int) -> None:
    """Run all inputs of a reader."""
    named, write, load, fits = READERS[name](folder)
    assert fits(load()), "what was not changed is not what was saved"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    dice = random.Random(23)
    refused = 0
    wrong: dict[str, str] = {}
    for number in range(count):
        write(dice)
        limit_time(number)
        try:
            loaded = load()
        except errors.Error as error:
            refused += 1
            is_named = error.filename is not None or str(named) in str(error)
            if not is_named or isinstance(error, errors.OutOfMemoryError):
                wrong.setdefault(f"{type(error).__name__}: {error}"[:200], f"input {number}")
        except BaseException as error:
            refused += 1
            # The same as from ``open``.
            if not isinstance(error, FileNotFoundError) or error.filename is None:
                place = error.__traceback__
                while place is not None and place.tb_next is not None:
                    place = place.tb_next
                where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
                wrong.setdefault(f"{type(error).__name__} {where}: {error}"[:300], f"input {number}")
        else:
            if not fits(loaded):
                wrong.setdefault("something else was loaded", f"input {number}")
    faulthandler.cancel_dump_traceback_later()
    for text, which in list(wrong.items())[:20]:
        print(f"{which}: {text}")  # noqa: T201
    assert not wrong
    assert refused > count // 20, f"only {refused} of {count} were refused"
