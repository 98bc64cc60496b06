"""State on disk, into a file and back, without a trip through memory where that can be avoided."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._deepnvme import read as read_bytes
from deepnvme._utils.metadata_file import open_regular
from deepnvme.errors import CorruptFileError, InvalidArgumentError
from deepnvme.optim import _saved_file as file
from deepnvme.optim._formats import FP32, put, take
from deepnvme.optim._saved_file import Parameter, Saved, Stretch
from deepnvme.optim._store import MASTER

if TYPE_CHECKING:
    from deepnvme.optim._formats import Kind
    from deepnvme.optim._layout import Group, Part
    from deepnvme.optim._step import KernelSteps
    from deepnvme.optim._swapped import SwapStore

_WHOLE_MAX = 1 << 63
# Of a group, what is the model's; and which of torch's own loops is taken, which may be left open.
_NOT_SETTINGS = ("params", "param_names")
_WAYS = ("fused", "foreach")
# The name of a whole tensor, and which of its elements is the first of a parameter.
Shards = Mapping[torch.nn.Parameter, tuple[str, int]]


def save(
    optimizer: KernelSteps, store: SwapStore, path: Path, shards: Shards | None, *, checksums: bool
) -> dict[str, int]:
    """Write the file; how many bytes went which way."""
    places = _places(optimizer, shards)
    groups = [group for group in store.layout.groups() if group.nbytes and _begun(store, group)]
    stretches, begins, at = [], [], 0
    for group in groups:
        store.prepare(group)
        begins.append(at)
        for part in _begun(store, group):
            name, first = places[part.piece.param]
            stretches += [
                Stretch(name, kind.name, first + part.piece.begin, part.piece.count, kind.format, at + begin)
                for kind, begin, _ in part.stretches()
            ]
        at += -(-group.nbytes // file.ALIGNED_BYTES) * file.ALIGNED_BYTES
    parameters = {
        places[param][0]: Parameter(
            float(state["step"]) if "step" in state else None,
            tuple(kind.name for kind in store.layout.kinds(param) or ()),
        )
        for param in places
        if store.has(param)
        for state in (optimizer.state.get(param, {}),)
    }
    settings = [_settings(group) for group in optimizer.param_groups]
    total: dict[str, int] = defaultdict(int)
    shapes = None if shards is not None else [list(param.shape) for param in places]
    saved = Saved(_name(optimizer), settings, shapes, parameters, stretches)
    with file.replacing(path, saved, at, checksums=checksums) as (fd, data_offset):
        for group, begin in zip(groups, begins, strict=True):
            for way, count in store.swapper.export(group.key, fd, data_offset + begin).items():
                total[way] += count
    return dict(total)


def load(
    optimizer: KernelSteps,
    store: SwapStore,
    paths: Sequence[Path],
    shards: Shards | None,
    verify: Literal["auto", "off", "sample", "full"],
) -> dict[str, int]:
    """Read files, of this many ranks or another number; how many bytes came which way."""
    unchanged = file.Unchanged(list(paths))
    loading = _Loading(optimizer, store, [file.read(path, verify) for path in paths], shards)
    try:
        loading.begin()
        for group in store.layout.groups():
            loading.bring(group)
        unchanged.check()
    except BaseException:
        # A part of it is nothing to go on with.
        loading.forget()
        raise
    return dict(loading.how)


class _Loading:
    """What files have, and where it goes."""

    def __init__(self, optimizer: KernelSteps, store: SwapStore, files: Sequence[Saved], shards: Shards | None) -> None:
        _check_files(optimizer, files, shards)
        self._optimizer, self._store = optimizer, store
        self._files = files
        self._groups = files[0].groups
        self._places = _places(optimizer, shards)
        self._there: dict[tuple[str, str], list[Stretch]] = defaultdict(list)
        self._parameters: dict[str, Parameter] = {}
        for one in files:
            for name, parameter in one.parameters.items():
                if self._parameters.setdefault(name, parameter) != parameter:
                    msg = (
                        f"{self._names(files)}: these files are of different steps or optimizers; they differ in {name}"
                    )
                    raise InvalidArgumentError(msg)
            for stretch in one.stretches:
                self._there[stretch.name, stretch.kind].append(stretch)
        for stretches in self._there.values():
            stretches.sort(key=lambda one: one.begin)
        # Nothing is changed before all is known to be there.
        self._kinds = {
            param: self._found(param, optimizer.kinds(param, {**group, **_values(group, settings)}))
            for group, settings in zip(optimizer.param_groups, self._groups, strict=True)
            for param in group["params"]
            if self._places[param][0] in self._parameters
        }
        self.how: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Set what groups are set to, and give parameters their places."""
        optimizer, store = self._optimizer, self._store
        optimizer.begin_loading()
        self.forget()
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            _set(group, settings)
            for param in group["params"]:
                if param in self._kinds:
                    step = self._parameters[self._places[param][0]].step
                    state = optimizer.state[param]
                    if step is not None:
                        state["step"] = torch.tensor(step)
                    store.begin(param, state, self._kinds[param])
            store.layout.close()

    def forget(self) -> None:
        """Have no state of any parameter."""
        for param in self._places:
            self._store.forget(param)
            self._optimizer.state.pop(param, None)

    def bring(self, group: Group) -> None:
        """Bring the state of a group, as a whole if a file has it so."""
        parts = _begun(self._store, group)
        if not parts or not group.nbytes:
            return
        source = self._same(group)
        if source is None:
            self._assemble(group, parts)
            return
        with open_regular(source[0]) as opened:
            how = self._store.swapper.import_(group.key, opened.fileno(), source[1], group.nbytes)
        for way, count in how.items():
            self.how[way] += count
        self._store.imported(group)

    def _found(self, param: torch.nn.Parameter, kinds: Sequence[Kind]) -> tuple[Kind, ...]:
        """Say which kinds of state a parameter finds; of each, all elements have to be there."""
        name, first = self._places[param]
        saved = self._parameters[name]
        others = set(saved.kinds).difference([MASTER], (kind.name for kind in kinds))
        if others or (saved.step is None and self._optimizer.counts_steps):
            which = f"{min(others)} of {name}" if others else f"{name} without a count of its steps"
            msg = f"{self._names(self._files)}: it has {which}, and this optimizer has not; another one saved it"
            raise InvalidArgumentError(msg)
        found = tuple(kind for kind in kinds if kind.name in saved.kinds)
        for kind in found:
            at = first
            for one in self._there.get((name, kind.name), []):
                at = one.end if one.begin <= at < one.end else at
            if at < first + param.numel():
                msg = (
                    f"{self._names(self._files)}: {kind.name} of {name} is missing from element {at} on; give the "
                    "files of all ranks, and the names that it was saved by"
                )
                raise InvalidArgumentError(msg)
        return found

    def _names(self, files: Sequence[Saved]) -> str:
        return ", ".join(str(one.path) for one in files)

    def _stretches(self, part: Part) -> list[tuple[Kind, int, list[Stretch], int]]:
        """For each kind, where in its group it begins, what files have of it, and its first element's number."""
        name, first = self._places[part.piece.param]
        return [
            (kind, begin, self._there[name, kind.name], first + part.piece.begin) for kind, begin, _ in part.stretches()
        ]

    def _same(self, group: Group) -> tuple[Path, int] | None:
        """Say where in a file a group lies as it lies here, if it does."""
        sources: set[tuple[Path, int] | None] = set()
        for part in group.parts:
            if not self._store.has(part.piece.param):
                return None
            for kind, begin, there, first in self._stretches(part):
                wanted = (first, part.piece.count, kind.format)
                found = [one for one in there if (one.begin, one.count, one.format) == wanted]
                sources.add((found[0].path, found[0].offset - begin) if found else None)
        source = sources.pop() if len(sources) == 1 else None
        # Where a group here has room that nobody uses, it may reach beyond what the file has.
        is_inside = source is not None and 0 <= source[1] <= source[0].stat().st_size - group.nbytes
        return source if is_inside else None

    def _assemble(self, group: Group, parts: Sequence[Part]) -> None:
        """Put a group together from what overlaps its parts."""
        self._store.prepare(group)
        with self._store.swapper.lend(group.key) as memory:
            for part in parts:
                state = part.state(memory)
                for kind, _, there, first in self._stretches(part):
                    values = torch.empty(part.piece.count)
                    for one in there:
                        low, high = max(one.begin, first), min(one.end, first + part.piece.count)
                        if low < high:
                            values[low - first : high - first] = _read(one, low, high, kind)
                    put(state[kind.name], values, kind)
                    self.how["memory_bytes"] += kind.format.nbytes(part.piece.count)


def _begun(store: SwapStore, group: Group) -> list[Part]:
    return [part for part in group.parts if store.has(part.piece.param)]


def _places(optimizer: KernelSteps, shards: Shards | None) -> Shards:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if shards is None:
        return {param: (str(index), 0) for index, param in enumerate(params)}
    missing = sum(param not in shards for param in params)
    if missing:
        msg = f"shards has no name for {missing} of {len(params)} parameters"
        raise ValueError(msg)
    return {param: shards[param] for param in params}


def _name(optimizer: KernelSteps) -> str:
    """Name the optimizer, also of a class that somebody has derived from it."""
    return next(kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("deepnvme.optim"))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in group.items():
        if name in _NOT_SETTINGS:
            continue
        found[name] = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            json.dumps(found[name])
        except (TypeError, ValueError) as error:
            msg = f"{name}={value!r} of a group of parameters cannot be saved as JSON; take it out of the group"
            raise TypeError(msg) from error
    return found


def _check_files(optimizer: KernelSteps, files: Sequence[Saved], shards: Shards | None) -> None:
    """Refuse files of another optimizer or model."""
    if not files:
        msg = "no file was given"
        raise ValueError(msg)
    wanted = len(optimizer.param_groups)
    for one in files:
        if one.optimizer != _name(optimizer):
            msg = f"{one.path}: {one.optimizer} saved it, and this is {_name(optimizer)}; make the same optimizer"
            raise InvalidArgumentError(msg)
        if len(one.groups) != wanted:
            msg = f"the file has {len(one.groups)} groups of parameters, this optimizer {wanted}"
            raise InvalidArgumentError(f"{one.path}: {msg}")
        for group, settings in zip(optimizer.param_groups, one.groups, strict=True):
            _check(group, settings, one.path)
            _check_values(optimizer, {**group, **_values(group, settings)}, one.path)
        if shards is None and one.shapes is not None:
            _check_shapes(optimizer, one.shapes, one.path)


def _check(group: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
    """Refuse settings of another kind than the group has: an optimizer would fail on them in its next step."""
    for name, value in settings.items():
        have = group.get(name)
        values = value if isinstance(value, list) else [value]
        if name in _NOT_SETTINGS:
            fits = False
        elif name in _WAYS:
            fits = value is None or isinstance(value, bool)
        elif isinstance(have, tuple | list) and all(map(_is_number, have)):
            fits = isinstance(value, list) and len(value) == len(have) and all(map(_is_number, value))
        elif isinstance(have, bool | str):
            fits = type(value) is type(have)
        elif isinstance(have, int | float | torch.Tensor):
            fits = _is_number(value)
        else:
            fits = all(one is None or isinstance(one, str | bool) or _is_number(one) for one in values)
        if not fits:
            text = f"{path}: {name} of a group of parameters would be {value!r}, where this optimizer has {have!r}"
            raise CorruptFileError(f"{text}; the file was damaged, or another optimizer saved it")


def _check_values(optimizer: KernelSteps, group: dict[str, Any], path: Path) -> None:
    """Refuse settings that the next step would refuse."""
    try:
        optimizer.check_settings(group)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        text = (
            f"{path}: settings of a group of parameters: {error}; the file was damaged, or another optimizer saved it"
        )
        raise CorruptFileError(text) from error


def _check_shapes(optimizer: KernelSteps, shapes: list[list[int]], path: Path) -> None:
    ours = [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
    if len(ours) != len(shapes):
        raise InvalidArgumentError(
            f"{path}: the file is of {len(shapes)} parameters, this optimizer has {len(ours)}; it is another model's"
        )
    for index, (own, saved) in enumerate(zip(ours, shapes, strict=True)):
        if own != saved:
            raise InvalidArgumentError(
                f"{path}: parameter {index} has the shape {tuple(saved)} in the file, and {tuple(own)} here; it is "
                "another model's"
            )


def _is_number(value: object) -> bool:
    # Whole numbers that no float is near would fail in the next step.
    return isinstance(value, float) or (type(value) is int and abs(value) < _WHOLE_MAX)


def _values(group: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Give settings the types that the group has: JSON knows no tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if not isinstance(group.get(name), torch.Tensor)
    }


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)
    group.update(_values(group, settings))


def _read(one: Stretch, low: int, high: int, kind: Kind) -> torch.Tensor:
    values = torch.empty(high - low)
    if one.format is FP32:
        read_bytes(values, one.path, one.offset + 4 * (low - one.begin))
        return values
    memory = torch.empty(one.format.nbytes(one.count), dtype=torch.uint8)
    read_bytes(memory, one.path, one.offset)
    whole = torch.empty(one.count)
    take(one.format.view(memory, one.count), whole, kind)
    return whole[low - one.begin : high - one.begin]
