"""Copy state on disk, with the settings of param groups, to a file and back: if possible, without a copy in memory."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.metadata_file import open_regular
from deepnvme._utils.public import WHOLE_MAX, whole
from deepnvme._utils.shards import first_element, local
from deepnvme._utils.tensors import MemoryOrder, is_dense_order, row_major
from deepnvme.errors import CorruptFileError, InvalidArgumentError, UnsupportedError
from deepnvme.optim import _state_file as file
from deepnvme.optim._state_file import ReorderedValues, SavedParameter, SavedValues, StateExtent, StateFile, windows
from deepnvme.optim._state_store import MASTER, Shards, encode, order_of, part_of

if TYPE_CHECKING:
    from deepnvme.optim._layout import Placement, StateGroup
    from deepnvme.optim._optimizer import OptimizerBase
    from deepnvme.optim._state_store import StateData, StateKind
    from deepnvme.optim._step import SteppingOptimizer
    from deepnvme.optim._swap_store import SwapStore

_WHOLE_MAX = 1 << 63
# Entries of a group that a file does not set: the parameters belong to the model.
_NOT_SETTINGS = ("params", "param_names")
# They choose between torch's own loops. A file may leave them unset.
_LOOP_SETTINGS = ("fused", "foreach")


def save(
    optimizer: SteppingOptimizer, store: SwapStore, path: Path, shards: Shards | None, *, checksums: bool
) -> dict[str, int]:
    """Write the file. Return bytes by route."""
    header, groups, begins, nbytes = _plan(optimizer, store, shards)
    total: dict[str, int] = defaultdict(int)
    with file.replace_file(path, header, nbytes, checksums=checksums) as (fd, data_offset):
        for group, begin in zip(groups, begins, strict=True):
            for route, count in store.swapper.export(group.key, fd, data_offset + begin).items():
                total[route] += count
    return dict(total)


@gc_paused
def _plan(
    optimizer: SteppingOptimizer, store: SwapStore, shards: Shards | None
) -> tuple[StateFile, list[StateGroup], list[int], int]:
    """Return the contents of the file, the groups of state, their offsets, and the size of all."""
    resolved = shards_of(optimizer, shards)
    check_disjoint(resolved)
    for param in resolved:
        store.follow(param)
    # A param group that was removed leaves its state in the store.
    groups = [
        group
        for group in store.layout.groups()
        if group.nbytes and any(one.slice.param in resolved for one in _placements_with_state(store, group))
    ]
    extents, begins, at = [], [], 0
    for group in groups:
        store.prepare(group)
        begins.append(at)
        for placement in _placements_with_state(store, group):
            if placement.slice.param not in resolved:
                continue
            name, first = resolved[placement.slice.param]
            extents += [
                StateExtent(
                    name, kind.name, first + placement.slice.begin, placement.slice.count, kind.format, at + begin
                )
                for kind, begin, _ in placement.extents()
            ]
        at += -(-group.nbytes // file.ALIGNED_BYTES) * file.ALIGNED_BYTES
    parameters: dict[str, SavedParameter] = {}
    for param in filter(store.has, resolved):
        state = optimizer.state.get(param, {})
        count = float(state["step"]) if "step" in state else None
        kinds = tuple(kind.name for kind in store.layout.kinds(param) or ())
        saved = SavedParameter(count, kinds, _stride_of(param))
        name, _ = resolved[param]
        if parameters.setdefault(name, saved) != saved:
            raise InvalidArgumentError(
                f"parts of {name!r} have other step counts, kinds of state or memory orders; a file has one for each "
                "name: step all of them, or give them names of their own"
            )
    settings = [encode_settings(optimizer, group) for group in optimizer.param_groups]
    shapes = None if shards is not None else [list(param.shape) for param in resolved]
    return StateFile(_name(optimizer), settings, shapes, parameters, extents), groups, begins, at


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

    @gc_paused
    def __init__(
        self, optimizer: SteppingOptimizer, store: SwapStore, files: Sequence[StateFile], shards: Shards | None
    ) -> None:
        _check_files(optimizer, files, shards)
        self._optimizer, self._store = optimizer, store
        self._files = files
        self._groups = files[0].groups
        self._shards = shards_of(optimizer, shards)
        extents: dict[tuple[str, str], list[StateExtent]] = defaultdict(list)
        self._parameters: dict[str, SavedParameter] = {}
        for saved in files:
            for name, parameter in saved.parameters.items():
                known = self._parameters.setdefault(name, parameter)
                if (known.step, known.kinds) != (parameter.step, parameter.kinds):
                    msg = (
                        f"{self._names(files)}: these files are of different steps or optimizers; they differ in {name}"
                    )
                    raise InvalidArgumentError(f"{msg}; give the files of one save")
            for extent in saved.extents:
                extents[extent.name, extent.kind].append(extent)
        self._saved = {key: SavedValues(found) for key, found in extents.items()}
        # Nothing is changed before everything is known to exist.
        self._kinds = {
            param: self._saved_kinds(
                param,
                optimizer._kinds(param, {**group, **decode_settings(group, settings)}),  # noqa: SLF001
            )
            for group, settings in zip(optimizer.param_groups, self._groups, strict=True)
            for param in group["params"]
            if self._shards[param][0] in self._parameters
        }
        # Parameters whose elements are counted in another order in the files.
        self._reordered = {
            param: ReorderedValues(
                order_of(param),
                self._saved_order(param),
                {kind: self._saved[self._shards[param][0], kind.name] for kind in self._kinds[param]},
            )
            for param in self._kinds
            if self._parameters[self._shards[param][0]].stride != _stride_of(param)
        }
        if self._reordered and shards is not None:
            name = self._shards[next(iter(self._reordered))][0]
            msg = f"{self._names(files)}: the elements of {name} have another memory order than in this model"
            raise InvalidArgumentError(f"{msg}; give the parameters the order that they were saved in")
        self.bytes_by_route: dict[str, int] = defaultdict(int)

    def begin(self) -> None:
        """Apply the settings of the groups, and give parameters their places."""
        optimizer, store = self._optimizer, self._store
        optimizer._begin_loading()  # noqa: SLF001
        self.forget()
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            apply_settings(group, settings)
            for param in group["params"]:
                if param in self._kinds:
                    step = self._parameters[self._shards[param][0]].step
                    state = optimizer.state[param]
                    if step is not None:
                        state["step"] = torch.tensor(step)
                    store.initialise(param, state, self._kinds[param])
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
            bytes_by_route = self._store.swapper.import_(group.key, opened.fileno(), source[1], group.nbytes)
        for route, count in bytes_by_route.items():
            self.bytes_by_route[route] += count
        self._store.imported(group)

    def _saved_kinds(self, param: torch.nn.Parameter, kinds: Sequence[StateKind]) -> tuple[StateKind, ...]:
        """Find the saved kinds of state of a parameter, and check that all its elements exist."""
        name, first = self._shards[param]
        saved = self._parameters[name]
        others = set(saved.kinds).difference([MASTER], (kind.name for kind in kinds))
        if others or (saved.step is None and self._optimizer._counts_steps):  # noqa: SLF001
            which = f"{min(others)} of {name}" if others else f"{name} without a count of its steps"
            msg = f"{self._names(self._files)}: it has {which}, unlike this optimizer; another one saved it"
            raise InvalidArgumentError(f"{msg}: create that one, with the same settings")
        found = tuple(kind for kind in kinds if kind.name in saved.kinds)
        for kind in found:
            at = self._saved.get((name, kind.name), SavedValues([])).missing(first, first + local(param).numel())
            if at is not None:
                msg = (
                    f"{self._names(self._files)}: {kind.name} of {name} is missing from element {at} on; give the "
                    "files of all ranks, and the names used for saving"
                )
                raise InvalidArgumentError(msg)
        return found

    def _saved_order(self, param: torch.nn.Parameter) -> MemoryOrder:
        """Return the memory order of a parameter in the files."""
        name, _ = self._shards[param]
        shape = tuple(local(param).shape)
        stride = self._parameters[name].stride
        strides = row_major(shape) if stride is None else stride
        order = MemoryOrder.of(shape, strides) if len(strides) == len(shape) else None
        if order is None or not is_dense_order(order):
            msg = f"{self._names(self._files)}: {name} has the strides {stride}"
            raise CorruptFileError(f"{msg}, which a tensor of shape {shape} cannot have; use another file")
        return order

    def _names(self, files: Sequence[StateFile]) -> str:
        return ", ".join(str(saved.path) for saved in files)

    def _matching_extent(self, group: StateGroup) -> tuple[Path, int] | None:
        """Find the position in a file where the group is stored with the same layout."""
        sources: set[tuple[Path, int] | None] = set()
        for placement in group.placements:
            if not self._store.has(placement.slice.param) or placement.slice.param in self._reordered:
                return None
            name, first = self._shards[placement.slice.param]
            for kind, begin, _ in placement.extents():
                saved = self._saved[name, kind.name]
                found = saved.matching(first + placement.slice.begin, placement.slice.count, kind.format)
                sources.add(None if found is None else (found.path, found.offset - begin))
        source = sources.pop() if len(sources) == 1 else None
        # A group with unused room may extend beyond the data in the file.
        is_inside = source is not None and 0 <= source[1] <= source[0].stat().st_size - group.nbytes
        return source if is_inside else None

    def _assemble(self, group: StateGroup, placements: Sequence[Placement]) -> None:
        """Assemble a group from overlapping extents."""
        self._store.prepare(group)
        with self._store.swapper.borrow(group.key) as memory:
            for placement in placements:
                self._read(placement, placement.state(memory))

    def _read(self, placement: Placement, state: dict[str, StateData]) -> None:
        """Read the state of a placement, a few MiB at a time."""
        placed = placement.slice
        name, first = self._shards[placed.param]
        reordered = self._reordered.get(placed.param)
        for begin, end in windows(placed.begin, placed.end):
            values = torch.empty(end - begin)
            for kind in placed.kinds:
                if reordered is not None:
                    reordered.fill(values, begin, kind, local(placed.param).numel())
                else:
                    self._saved[name, kind.name].fill(values, first + begin, kind)
                encode(part_of(state[kind.name], begin - placed.begin, end - placed.begin), values, kind)
        self.bytes_by_route["memory_bytes"] += sum(kind.format.nbytes(placed.count) for kind in placed.kinds)


def shards_of(optimizer: OptimizerBase, shards: Shards | None) -> dict[torch.nn.Parameter, tuple[str, int]]:
    """Return the name and the first element of each parameter, as a file can have them.

    Raises:
        InvalidArgumentError: one is missing, or is not a pair of a name and an index.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if shards is None:
        return {param: (str(index), _first_element(param, index)) for index, param in enumerate(params)}
    if not isinstance(shards, Mapping):
        raise InvalidArgumentError(f"shards is {shards!r:.100}; it must be a dict: {{param: (name, first_element)}}")
    missing = sum(param not in shards for param in params)
    if missing:
        msg = f"shards has no name for {missing} of {len(params)} parameters; name each parameter of the optimizer"
        raise InvalidArgumentError(msg)
    return {param: _shard(shards[param], local(param).numel()) for param in params}


def _first_element(param: torch.nn.Parameter, index: int) -> int:
    first = first_element(param)
    if first is None:
        msg = (
            f"parameter {index}, of shape {tuple(param.shape)}, is split so that the elements of a process are no "
            "contiguous range, as files of save_state have them; save state_dict() as a checkpoint instead"
        )
        raise UnsupportedError(msg)
    return first


def check_disjoint(shards: Mapping[torch.nn.Parameter, tuple[str, int]]) -> None:
    """Refuse parameters that are the same elements of a tensor: a file has one value for each.

    Raises:
        InvalidArgumentError: two of them overlap.
    """
    counts = {param: local(param).numel() for param in shards}
    ranges = sorted((name, first, first + counts[param]) for param, (name, first) in shards.items() if counts[param])
    for (name, begin, end), (other, first, last) in itertools.pairwise(ranges):
        if name == other and first < end:
            raise InvalidArgumentError(
                f"shards has two parameters for elements of {name!r}: {begin} to {end - 1} and {first} to {last - 1}; "
                "give each parameter elements of its own"
            )


def _placements_with_state(store: SwapStore, group: StateGroup) -> list[Placement]:
    return [placement for placement in group.placements if store.has(placement.slice.param)]


def _name(optimizer: SteppingOptimizer) -> str:
    """Return the name of the optimizer class, even for derived classes."""
    return next(kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("deepnvme.optim"))


def _check_files(optimizer: SteppingOptimizer, files: Sequence[StateFile], shards: Shards | None) -> None:
    """Refuse files of another optimizer or model."""
    if not files:
        msg = "no file was given; pass at least one path"
        raise InvalidArgumentError(msg)
    wanted = len(optimizer.param_groups)
    for saved in files:
        if saved.optimizer != _name(optimizer):
            msg = f"{saved.path}: {saved.optimizer} saved it, and this is {_name(optimizer)}; create the same optimizer"
            raise InvalidArgumentError(msg)
        if len(saved.groups) != wanted:
            msg = f"{saved.path}: the file has {len(saved.groups)} param groups, this optimizer has {wanted}"
            raise InvalidArgumentError(f"{msg}; create the optimizer with the same groups")
        for group, settings in zip(optimizer.param_groups, saved.groups, strict=True):
            check_settings(optimizer, group, settings, saved.path)
        if shards is None and saved.shapes is not None:
            _check_shapes(optimizer, saved.shapes, saved.path)


def _check_shapes(optimizer: SteppingOptimizer, shapes: list[list[int]], path: Path) -> None:
    ours = [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
    if len(ours) != len(shapes):
        raise InvalidArgumentError(
            f"{path}: the file has {len(shapes)} parameters, this optimizer has {len(ours)}; it is another model's: "
            "give the file of this one"
        )
    for index, (own, saved) in enumerate(zip(ours, shapes, strict=True)):
        if own != saved:
            raise InvalidArgumentError(
                f"{path}: parameter {index} has the shape {tuple(saved)} in the file, and {tuple(own)} here; it is "
                "another model's: give the file of this one"
            )


def _stride_of(param: torch.nn.Parameter) -> tuple[int, ...] | None:
    order = order_of(param)
    return None if order.is_row_major else order.stride


def _shard(given: Any, count: int) -> tuple[str, int]:
    is_pair = isinstance(given, tuple | list) and len(given) == 2  # noqa: PLR2004
    name, first = given if is_pair else (None, None)
    try:
        # A text without lone surrogates.
        str.encode(name)  # type: ignore[arg-type]
        return str(name), whole(first, "first", 0, WHOLE_MAX - count)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"shards has {given!r:.200} for a parameter of {count} elements; it must be a tuple of the name of the "
            "whole tensor, which UTF-8 can encode, and the index of its first element, such as ('layer.weight', 0)"
        ) from error


def encode_settings(optimizer: SteppingOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as JSON can contain them.

    Raises:
        InvalidArgumentError: ``check_settings`` would refuse them.
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


def check_settings(optimizer: SteppingOptimizer, group: dict[str, Any], settings: dict[str, Any], path: Path) -> None:
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
        optimizer._check_settings({**group, **decode_settings(group, settings)})  # noqa: SLF001
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        return str(error)
    return None


def decode_settings(group: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Restore the types of settings: JSON has no tuples. Omit those that are tensors in the group."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if not isinstance(group.get(name), torch.Tensor)
    }


def apply_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set the settings of a group. Its tensors keep their memory."""
    for name, value in settings.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)
    group.update(decode_settings(group, settings))


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
