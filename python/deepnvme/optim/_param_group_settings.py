"""Settings of param groups in a state file: write them as JSON, check those of a file, and apply them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.errors import CorruptFileError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme.optim._step import SteppingOptimizer

_WHOLE_MAX = 1 << 63
# Entries of a group that a file does not set: the parameters belong to the model.
_NOT_SETTINGS = ("params", "param_names")
# They choose between torch's own loops. A file may leave them unset.
_LOOP_SETTINGS = ("fused", "foreach")


def encode(optimizer: SteppingOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as JSON can contain them.

    Raises:
        InvalidArgumentError: ``check`` would refuse them.
        TypeError: JSON cannot contain them.
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in _NOT_SETTINGS:
            continue
        found[name] = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            json.dumps(found[name])
        except (TypeError, ValueError) as error:
            msg = f"{name}={value!r} of a group of parameters cannot be saved as JSON; remove it from the group"
            raise TypeError(msg) from error
    loaded = json.loads(json.dumps(found))
    refusal = _refusal(optimizer, group, loaded)
    if refusal is not None:
        msg = f"settings of a group of parameters: {refusal}; load_state would refuse them: change or remove them"
        raise InvalidArgumentError(msg)
    return found


def check(optimizer: SteppingOptimizer, group: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
    """Refuse settings of a file that the next step would refuse, or fail on."""
    refusal = _refusal(optimizer, group, settings)
    if refusal is not None:
        text = f"{path}: settings of a group of parameters: {refusal}"
        raise CorruptFileError(f"{text}; the file was damaged, or another optimizer saved it")


def _refusal(optimizer: SteppingOptimizer, group: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Say why a group cannot have these settings; ``None`` if it can."""
    misfit = _misfit(group, settings)
    if misfit is not None:
        return misfit
    try:
        optimizer._check_settings({**group, **decode(group, settings)})  # noqa: SLF001
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        return str(error)
    return None


def decode(group: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Restore the types of settings: JSON has no tuples. Omit those that are tensors in the group."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if not isinstance(group.get(name), torch.Tensor)
    }


def apply(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set the settings of a group. Its tensors keep their memory."""
    for name, value in settings.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)
    group.update(decode(group, settings))


def _misfit(group: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Find a setting of another type than the group has: the next step would fail on it."""
    for name, value in settings.items():
        have = group.get(name)
        values = value if isinstance(value, list) else [value]
        if name in _NOT_SETTINGS:
            fits = False
        elif name in _LOOP_SETTINGS:
            fits = value is None or isinstance(value, bool)
        elif isinstance(have, tuple | list) and all(map(_is_number, have)):
            fits = isinstance(value, list) and len(value) == len(have) and all(map(_is_number, value))
        elif isinstance(have, bool | str):
            fits = type(value) is type(have)
        elif isinstance(have, int | float | torch.Tensor):
            fits = _is_number(value)
        else:
            fits = all(element is None or isinstance(element, str | bool) or _is_number(element) for element in values)
        if not fits:
            return f"{name} would be {value!r}, where this optimizer has {have!r}"
    return None


def _is_number(value: object) -> bool:
    # Integers beyond the range of floats would fail in the next step.
    return isinstance(value, float) or (type(value) is int and abs(value) < _WHOLE_MAX)
