"""Copy state on disk to a file and back, without passing through memory where possible."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._deepnvme import read as read_bytes
from deepnvme._utils.metadata_file import open_regular
from deepnvme.errors import CorruptFileError, InvalidArgumentError
from deepnvme.optim import _state_file as file
from deepnvme.optim._formats import FP32, decode, encode
from deepnvme.optim._state_file import SavedParameter, StateExtent, StateFile
from deepnvme.optim._state_store import MASTER, Shards

if TYPE_CHECKING:
    from deepnvme.optim._formats import StateKind
    from deepnvme.optim._layout import Placement, StateGroup
    from deepnvme.optim._step import SteppingOptimizer
    from deepnvme.optim._swap_store import SwapStore

_WHOLE_MAX = 1 << 63
# Group entries that belong to the model; and the choice of torch's loops, which may be unset.
_NOT_SETTINGS = ("params", "param_names")
_LOOP_SETTINGS = ("fused", "foreach")


def save(
    optimizer: SteppingOptimizer, store: SwapStore, path: Path, shards: Shards | None, *, checksums: bool
) -> dict[str, int]:
    """Write the file. Return bytes by route."""
    resolved = _resolve_shards(optimizer, shards)
    groups = [group for group in store.layout.groups() if group.nbytes and _placements_with_state(store, group)]
    extents, begins, at = [], [], 0
    for group in groups:
        store.prepare(group)
        begins.append(at)
        for placement in _placements_with_state(store, group):
            name, first = resolved[placement.piece.param]
            extents += [
                StateExtent(
                    name, kind.name, first + placement.piece.begin, placement.piece.count, kind.format, at + begin
                )
                for kind, begin, _ in placement.extents()
            ]
        at += -(-group.nbytes // file.ALIGNED_BYTES) * file.ALIGNED_BYTES
    parameters = {
        resolved[param][0]: SavedParameter(
            float(state["step"]) if "step" in state else None,
            tuple(kind.name for kind in store.layout.kinds(param) or ()),
        )
        for param in resolved
        if store.has(param)
        for state in (optimizer.state.get(param, {}),)
    }
    settings = [_settings(group) for group in optimizer.param_groups]
    total: dict[str, int] = defaultdict(int)
    shapes = None if shards is not None else [list(param.shape) for param in resolved]
    saved = StateFile(_name(optimizer), settings, shapes, parameters, extents)
    with file.replace_file(path, saved, at, checksums=checksums) as (fd, data_offset):
        for group, begin in zip(groups, begins, strict=True):
            for route, count in store.swapper.export(group.key, fd, data_offset + begin).items():
                total[route] += count
    return dict(total)


def load(
    optimizer: SteppingOptimizer,
    store: SwapStore,
    paths: Sequence[Path],
    shards: Shards | None,
    verify: Literal["auto", "off", "sample", "full"],
) -> dict[str, int]:
    """Read the files of any number of ranks. Return bytes by route."""
    guard = file.FileGuard(list(paths))
    loading = _Loader(optimizer, store, [file.read(path, verify) for path in paths], shards)
    try:
        loading.begin()
        for group in store.layout.groups():
            loading.load_group(group)
        guard.check()
    except BaseException:
        # Partially loaded state is useless.
        loading.forget()
        raise
    return dict(loading.bytes_by_route)


class _Loader:
    """Maps the contents of files to parameters."""

    def __init__(
        self, optimizer: SteppingOptimizer, store: SwapStore, files: Sequence[StateFile], shards: Shards | None
    ) -> None:
        _check_files(optimizer, files, shards)
        self._optimizer, self._store = optimizer, store
        self._files = files
        self._groups = files[0].groups
        self._shards = _resolve_shards(optimizer, shards)
        self._extents: dict[tuple[str, str], list[StateExtent]] = defaultdict(list)
        self._parameters: dict[str, SavedParameter] = {}
        for one in files:
            for name, parameter in one.parameters.items():
                if self._parameters.setdefault(name, parameter) != parameter:
                    msg = (
                        f"{self._names(files)}: these files are of different steps or optimizers; they differ in {name}"
                    )
                    raise InvalidArgumentError(msg)
            for extent in one.extents:
                self._extents[extent.name, extent.kind].append(extent)
        for extents in self._extents.values():
            extents.sort(key=lambda one: one.begin)
        # Nothing is changed before everything is known to exist.
        self._kinds = {
            param: self._found(param, optimizer.kinds(param, {**group, **_values(group, settings)}))
            for group, settings in zip(optimizer.param_groups, self._groups, strict=True)
            for param in group["params"]
            if self._shards[param][0] in self._parameters
        }
        self.bytes_by_route: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Apply the settings of the groups, and give parameters their places."""
        optimizer, store = self._optimizer, self._store
        optimizer.begin_loading()
        self.forget()
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            _set(group, settings)
            for param in group["params"]:
                if param in self._kinds:
                    step = self._parameters[self._shards[param][0]].step
                    state = optimizer.state[param]
                    if step is not None:
                        state["step"] = torch.tensor(step)
                    store.initialize(param, state, self._kinds[param])
            store.layout.close_group()

    def forget(self) -> None:
        """Drop the state of all parameters."""
        for param in self._shards:
            self._store.discard(param)
            self._optimizer.state.pop(param, None)

    def load_group(self, group: StateGroup) -> None:
        """Load the state of a group, as a whole if a file contains it as a whole."""
        placements = _placements_with_state(self._store, group)
        if not placements or not group.nbytes:
            return
        source = self._matching_extent(group)
        if source is None:
            self._assemble(group, placements)
            return
        with open_regular(source[0]) as opened:
            how = self._store.swapper.import_(group.key, opened.fileno(), source[1], group.nbytes)
        for route, count in how.items():
            self.bytes_by_route[route] += count
        self._store.imported(group)

    def _found(self, param: torch.nn.Parameter, kinds: Sequence[StateKind]) -> tuple[StateKind, ...]:
        """Find the saved kinds of state of a parameter, and check that all its elements exist."""
        name, first = self._shards[param]
        saved = self._parameters[name]
        others = set(saved.kinds).difference([MASTER], (kind.name for kind in kinds))
        if others or (saved.step is None and self._optimizer.counts_steps):
            which = f"{min(others)} of {name}" if others else f"{name} without a count of its steps"
            msg = f"{self._names(self._files)}: it has {which}, unlike this optimizer; another one saved it"
            raise InvalidArgumentError(msg)
        found = tuple(kind for kind in kinds if kind.name in saved.kinds)
        for kind in found:
            at = first
            for one in self._extents.get((name, kind.name), []):
                at = one.end if one.begin <= at < one.end else at
            if at < first + param.numel():
                msg = (
                    f"{self._names(self._files)}: {kind.name} of {name} is missing from element {at} on; give the "
                    "files of all ranks, and the names used for saving"
                )
                raise InvalidArgumentError(msg)
        return found

    def _names(self, files: Sequence[StateFile]) -> str:
        return ", ".join(str(one.path) for one in files)

    def _placement_extents(self, placement: Placement) -> list[tuple[StateKind, int, list[StateExtent], int]]:
        """For each kind: its offset in the group, the extents in the files, and the index of its first element."""
        name, first = self._shards[placement.piece.param]
        return [
            (kind, begin, self._extents[name, kind.name], first + placement.piece.begin)
            for kind, begin, _ in placement.extents()
        ]

    def _matching_extent(self, group: StateGroup) -> tuple[Path, int] | None:
        """Find the position in a file where the group is stored with the same layout."""
        sources: set[tuple[Path, int] | None] = set()
        for placement in group.placements:
            if not self._store.has(placement.piece.param):
                return None
            for kind, begin, there, first in self._placement_extents(placement):
                wanted = (first, placement.piece.count, kind.format)
                found = [one for one in there if (one.begin, one.count, one.format) == wanted]
                sources.add((found[0].path, found[0].offset - begin) if found else None)
        source = sources.pop() if len(sources) == 1 else None
        # A group with unused room may extend beyond the data in the file.
        is_inside = source is not None and 0 <= source[1] <= source[0].stat().st_size - group.nbytes
        return source if is_inside else None

    def _assemble(self, group: StateGroup, placements: Sequence[Placement]) -> None:
        """Assemble a group from overlapping extents."""
        self._store.prepare(group)
        with self._store.swapper.borrow(group.key) as memory:
            for placement in placements:
                state = placement.state(memory)
                for kind, _, there, first in self._placement_extents(placement):
                    values = torch.empty(placement.piece.count)
                    for one in there:
                        low, high = max(one.begin, first), min(one.end, first + placement.piece.count)
                        if low < high:
                            values[low - first : high - first] = _read(one, low, high, kind)
                    encode(state[kind.name], values, kind)
                    self.bytes_by_route["memory_bytes"] += kind.format.nbytes(placement.piece.count)


def _placements_with_state(store: SwapStore, group: StateGroup) -> list[Placement]:
    return [placement for placement in group.placements if store.has(placement.piece.param)]


def _resolve_shards(optimizer: SteppingOptimizer, shards: Shards | None) -> Shards:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if shards is None:
        return {param: (str(index), 0) for index, param in enumerate(params)}
    missing = sum(param not in shards for param in params)
    if missing:
        msg = f"shards has no name for {missing} of {len(params)} parameters"
        raise ValueError(msg)
    return {param: shards[param] for param in params}


def _name(optimizer: SteppingOptimizer) -> str:
    """Return the name of the optimizer class, also for derived classes."""
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
            msg = f"{name}={value!r} of a group of parameters cannot be saved as JSON; remove it from the group"
            raise TypeError(msg) from error
    return found


def _check_files(optimizer: SteppingOptimizer, files: Sequence[StateFile], shards: Shards | None) -> None:
    """Refuse files of another optimizer or model."""
    if not files:
        msg = "no file was given; pass at least one path"
        raise ValueError(msg)
    wanted = len(optimizer.param_groups)
    for one in files:
        if one.optimizer != _name(optimizer):
            msg = f"{one.path}: {one.optimizer} saved it, and this is {_name(optimizer)}; create the same optimizer"
            raise InvalidArgumentError(msg)
        if len(one.groups) != wanted:
            msg = f"the file has {len(one.groups)} param groups, this optimizer has {wanted}"
            raise InvalidArgumentError(f"{one.path}: {msg}")
        for group, settings in zip(optimizer.param_groups, one.groups, strict=True):
            _check(group, settings, one.path)
            _check_values(optimizer, {**group, **_values(group, settings)}, one.path)
        if shards is None and one.shapes is not None:
            _check_shapes(optimizer, one.shapes, one.path)


def _check(group: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
    """Refuse settings of another type than the group has: the next step would fail on them."""
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
            fits = all(one is None or isinstance(one, str | bool) or _is_number(one) for one in values)
        if not fits:
            text = f"{path}: {name} of a group of parameters would be {value!r}, where this optimizer has {have!r}"
            raise CorruptFileError(f"{text}; the file was damaged, or another optimizer saved it")


def _check_values(optimizer: SteppingOptimizer, group: dict[str, Any], path: Path) -> None:
    """Refuse settings that the next step would refuse."""
    try:
        optimizer.check_settings(group)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        text = (
            f"{path}: settings of a group of parameters: {error}; the file was damaged, or another optimizer saved it"
        )
        raise CorruptFileError(text) from error


def _check_shapes(optimizer: SteppingOptimizer, shapes: list[list[int]], path: Path) -> None:
    ours = [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
    if len(ours) != len(shapes):
        raise InvalidArgumentError(
            f"{path}: the file has {len(shapes)} parameters, this optimizer has {len(ours)}; it is another model's"
        )
    for index, (own, saved) in enumerate(zip(ours, shapes, strict=True)):
        if own != saved:
            raise InvalidArgumentError(
                f"{path}: parameter {index} has the shape {tuple(saved)} in the file, and {tuple(own)} here; it is "
                "another model's"
            )


def _is_number(value: object) -> bool:
    # Integers beyond the range of floats would fail in the next step.
    return isinstance(value, float) or (type(value) is int and abs(value) < _WHOLE_MAX)


def _values(group: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Restore the types of settings: JSON has no tuples."""
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


def _read(one: StateExtent, low: int, high: int, kind: StateKind) -> torch.Tensor:
    values = torch.empty(high - low)
    if one.format is FP32:
        read_bytes(values, one.path, one.offset + 4 * (low - one.begin))
        return values
    memory = torch.empty(one.format.nbytes(one.count), dtype=torch.uint8)
    read_bytes(memory, one.path, one.offset)
    whole = torch.empty(one.count)
    decode(one.format.view(memory, one.count), whole, kind)
    return whole[low - one.begin : high - one.begin]
