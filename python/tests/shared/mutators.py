"""Seeded mutations of texts, pickles and files, for the programs that attack readers."""

from __future__ import annotations

import contextlib
import functools
import json
import pickletools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

NUMBERS = [0, 1, 7, 255, 4096, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, -1, 0.5, 1e300, 10**400]
TEXTS = ["", "F64", "I32", "../x", "/etc/passwd", "__metadata__", "deepnvme.checksums", "\0\U0001f600", "\ud800"]
TEXTS.append("a" * 5000)
OPERATIONS = [
    b"(", b"t", b"]", b"}", b")", b"R", b"Q", b"b", b"s", b"u", b"e", b"a", b"0", b"2", b"N", b"q\x00", b"h\x00",
    b"\x81", b"\x85", b"\x93", b"\x91", b"\x90", b"\x8f", b"j\xff\xff\xff\xff", b"K\x00", b"M\xff\xff",
    b"\x8a\x01\xff", b"G" + bytes(8),
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\x01\x00\x00\x00k", b"X\xff\xff\xff\xff", b"C\x01x", b"\x88", b".",
    b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n", b"ccollections\nCounter\n",
    b"ctorch\ndevice\n", b"c_codecs\nencode\n", b"cbuiltins\ncomplex\n", b"cbuiltins\nbytearray\n",
    b"cbuiltins\ngetattr\n",
    b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nfloat32\n",
]  # fmt: skip
Load = Callable[[], object]
# The path that errors name, a writer of one more input, the reader, and a check that a result is the saved state.
Target: TypeAlias = tuple[Path, Callable[[random.Random], None], Load, Callable[[object], bool]]


def mutate_json(value: Any, dice: random.Random) -> Any:  # noqa: C901, PLR0911
    """Change one item of a document: a number, a text, a type, a count, or the order."""
    if dice.random() < 0.75:
        if isinstance(value, dict) and value:
            key = dice.choice(list(value))
            return {name: mutate_json(one, dice) if name == key else one for name, one in value.items()}
        if isinstance(value, list) and value:
            at = dice.randrange(len(value))
            return [mutate_json(one, dice) if index == at else one for index, one in enumerate(value)]
        if isinstance(value, str) and value[:1] in "{[":
            with contextlib.suppress(ValueError):
                return json.dumps(mutate_json(json.loads(value), dice))
    if isinstance(value, bool) or value is None:
        return dice.choice([1, "x", [], {}, not value])
    if isinstance(value, int | float):
        return dice.choice([value + 1, value - 1, -value, str(value), None, *NUMBERS])
    if isinstance(value, str):
        return dice.choice([value + "0", value[:-1], value * 100, value.upper(), value[::-1], 5, None, [], *TEXTS])
    if isinstance(value, list):
        return dice.choice([value[:-1], value[::-1], value + value[:1], [1] * 70, {}, None, [value]])
    changed = dict(value)
    key = dice.choice(list(changed) or [""])
    taken = changed.pop(key, None)
    way = dice.randrange(4)
    if way == 1:
        changed[dice.choice(TEXTS)] = taken
    elif way == 2:
        changed[key + "x"] = taken
    elif way == 3:
        changed[key] = dice.choice([*changed.values(), None])
    return changed


def as_text(document: Any, dice: random.Random) -> bytes:
    """Write a document, sometimes truncated or with a duplicate name."""
    text = json.dumps(document).encode()
    way = dice.randrange(20)
    if way == 0:
        return text[: dice.randrange(len(text) + 1)]
    return text[:1] + text[1:-1] + b"," + text[1:] if way == 1 else text


@functools.lru_cache(maxsize=4)
def operations_of(data: bytes) -> list[bytes]:
    """Split a pickle into its instructions, or into bytes if it is damaged."""
    try:
        places = [place for _, _, place in pickletools.genops(data)]
    except Exception:
        places = list(range(len(data)))
    places = places or [0]
    return [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]


def mutate_pickle(data: bytes, dice: random.Random) -> bytes:
    """Change instructions: their order, number, kind and arguments."""
    ops = list(operations_of(data))
    at = dice.randrange(len(ops))
    way = dice.randrange(8)
    if way == 0:
        ops.insert(at, dice.choice(OPERATIONS))
    elif way == 1:
        ops[at] = dice.choice(OPERATIONS)
    elif way == 2:
        del ops[at]
    elif way == 3:
        ops[at:at] = ops[at : at + dice.randrange(1, 10)] * dice.randrange(1, 20)
    elif way == 4:
        other = dice.randrange(len(ops))
        ops[at], ops[other] = ops[other], ops[at]
    elif way == 5:
        ops = ops[:at]
    elif way == 6 and len(ops[at]) > 1:
        changed = bytearray(ops[at])
        changed[dice.randrange(1, len(changed))] = dice.choice([0, 1, 127, 128, 255])
        ops[at] = bytes(changed)
    else:
        ops[at:at] = [b"X" + struct.pack("<I", 3) + b"abc", b"0"]
    return b"".join(ops)


def same(loaded: Any, state: Any) -> bool:
    """Whether two states of dicts and tensors are equal."""
    if isinstance(state, torch.Tensor):
        is_like = isinstance(loaded, torch.Tensor) and loaded.dtype == state.dtype and loaded.shape == state.shape
        return is_like and torch.equal(loaded, state)
    if isinstance(state, dict):
        is_dict = isinstance(loaded, dict) and loaded.keys() == state.keys()
        return is_dict and all(same(loaded[key], value) for key, value in state.items())
    return type(loaded) is type(state) and bool(loaded == state)
