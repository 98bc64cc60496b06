"""Read and write files of optimizer state: safetensors files whose header describes the elements of each extent.

Groups have the same layout as in the swap file. Each starts at a multiple of 4096 bytes, so that file systems can share
their blocks. Tensors called ``pad.N`` fill the gaps, since the format allows none. Checksums, if the caller wants them,
cover every byte, as in all files that deepnvme saves. Values are read range by range, from any number of files.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._deepnvme import _CheckpointReader, _ReflinkTarget, read_batch
from deepnvme._utils.gc_pause import GcPause, gc_paused
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import ClosedError, CorruptFileError, Error, OutOfMemoryError, UnsupportedError
from deepnvme.optim._state_store import BLOCK, EIGHT_BIT, FORMATS, FP32, StateFormat, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deepnvme._utils.tensors import MemoryOrder
    from deepnvme.optim._state_store import StateKind

ALIGNED_BYTES = 4096
_NAME = "deepnvme.optimizer"
_VERSION = 5
# Larger step counts are not exact in a float.
_STEPS_MAX = 1 << 53
_PADDING = re.compile(r"pad\.\d+")
# Elements that are read at once: 2 MiB as fp32, and several times as much for the places of elements in another memory
# order. A multiple of a block.
ELEMENTS_MAX = 1 << 19


@dataclass(frozen=True)
class StateExtent:
    """The position in a file of one kind of state, for a range of elements of a whole tensor."""

    name: str
    kind: str
    begin: int
    count: int
    format: StateFormat
    offset: int
    path: Path = field(default_factory=Path)

    @property
    def end(self) -> int:
        """Index behind the last element."""
        return self.begin + self.count

    @property
    def tensor(self) -> str:
        """Name of the tensor in the file."""
        return f"{self.name}.{self.kind}.{self.begin}"

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.format.nbytes(self.count) if self.format is EIGHT_BIT else self.count * self.format.dtype.itemsize


@dataclass(frozen=True)
class SavedParameter:
    """The step count of a parameter, if its optimizer counts steps, its kinds of state, and its memory order."""

    step: float | None
    kinds: tuple[str, ...]
    stride: tuple[int, ...] | None = None
    """The strides of a ``MemoryOrder``, in which its elements are counted. ``None`` for row-major order."""


@dataclass
class StateFile:
    """The header of a file.

    It contains the optimizer's name, the settings of param groups, the shapes of all parameters if they are whole, the
    parameters with state, and the extents.
    """

    optimizer: str
    groups: list[dict[str, Any]]
    shapes: list[list[int]] | None
    parameters: dict[str, SavedParameter]
    extents: list[StateExtent]
    path: Path = field(default_factory=Path)


@contextmanager
def replace_file(path: Path, saved: StateFile, nbytes: int, *, checksums: bool) -> Iterator[tuple[int, int]]:
    """Create a file, and yield its descriptor and the offset of its ``nbytes`` of tensor data, to be filled.

    The file is synced and gets its name, with checksums, if the block ends without an error.
    """
    with GcPause():
        header = json.dumps(_header(saved, checksums=checksums))
        new = _ReflinkTarget(path, _tensors(saved, nbytes), [(_NAME, header)], checksums)
    try:
        yield new.fileno(), new.data_offset
        new.commit()
    except OSError as error:
        # A closed engine is not an error of this folder.
        is_of_file = error.filename in (None, new.private_path)
        if is_of_file and not isinstance(error, ClosedError) and not is_of_handler(error):
            text = f"{error.strerror}; the previous file is unchanged; make room, or use another folder"
            raise Error(error.errno, text, str(path)) from error
        raise
    finally:
        new.discard()


def _header(saved: StateFile, *, checksums: bool) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "checksums": checksums,
        "optimizer": saved.optimizer,
        "groups": saved.groups,
        "shapes": saved.shapes,
        "parameters": {
            name: {"step": one.step, "kinds": one.kinds, "stride": one.stride} for name, one in saved.parameters.items()
        },
        "stretches": [[one.name, one.kind, one.begin, one.count, one.format.name] for one in saved.extents],
    }


def _tensors(saved: StateFile, nbytes: int) -> list[tuple[str, str, int]]:
    """List the tensors of the file in order."""
    tensors: list[tuple[str, str, int]] = []
    at = 0
    for one in sorted(saved.extents, key=lambda one: one.offset):
        if at < one.offset:
            tensors.append((f"pad.{at}", "uint8", one.offset - at))
        dtype = one.format.dtype
        tensors.append((one.tensor, str(dtype).removeprefix("torch."), one.nbytes // dtype.itemsize))
        at = one.offset + one.nbytes
    if at < nbytes:
        tensors.append((f"pad.{at}", "uint8", nbytes - at))
    return tensors


def read(path: Path, verify: Literal["auto", "off", "sample", "full"]) -> StateFile:
    """Read and check the header of a file, and compare bytes with checksums as ``verify`` says.

    Offsets count from the beginning of the file.

    Raises:
        CorruptFileError: it is truncated, or not such a file.
        ChecksumError: bytes differ from those that were saved.
    """
    reader = _open(path)
    if verify != "off":
        reader.check(None)
    header, saved = _described(reader, path)
    if verify != "off":
        # One entry states that there are checksums, and another contains them. Damage to one place cannot remove both.
        if header.get("checksums") is not False and reader.coverage != "file":
            raise _corrupt(path, 8, "it was saved with checksums, but they are missing")
        reader.verify_tensors("full" if verify == "full" else "sample")
    return saved


@gc_paused
def _described(reader: _CheckpointReader, path: Path) -> tuple[dict[str, Any], StateFile]:
    """Return the header, and its description of the file."""
    there = {name: (nbytes, offset) for name, nbytes, _, offset in reader.storages()}
    try:
        header = json.loads(dict(reader.metadata)[_NAME])
        if header["version"] != _VERSION:
            raise _corrupt(path, 8, f"it has version {header['version']!r}, and this deepnvme reads {_VERSION}")
        saved = StateFile(
            _optimizer(header, path), _groups(header, path), _shapes(header, path), _parameters(header, path), [], path
        )
        saved.extents.extend(_extent(path, there, *one) for one in header["stretches"])
        _check_complete(path, there, saved)
    except CorruptFileError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{path}: not enough memory for its header") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if is_of_handler(error):
            raise
        raise _corrupt(path, 8, f"its header is not that of save_state ({type(error).__name__}: {error})") from error
    return header, saved


def _optimizer(header: dict[str, Any], path: Path) -> str:
    name = header["optimizer"]
    if not isinstance(name, str):
        raise _corrupt(path, 8, "it does not name its optimizer")
    return name


def _shapes(header: dict[str, Any], path: Path) -> list[list[int]] | None:
    shapes = header["shapes"]
    is_list = isinstance(shapes, list) and all(isinstance(shape, list) for shape in shapes)
    if shapes is not None and not (is_list and all(type(size) is int for shape in shapes for size in shape)):
        raise _corrupt(path, 8, "the shapes of its parameters are not lists of sizes")
    return None if shapes is None else list(shapes)


def _groups(header: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    if not all(isinstance(group, dict) for group in header["groups"]):
        raise _corrupt(path, 8, "its groups of parameters have no settings")
    return list(header["groups"])


def _parameters(header: dict[str, Any], path: Path) -> dict[str, SavedParameter]:
    found = {}
    for name, one in header["parameters"].items():
        step, kinds, stride = one["step"], one["kinds"], one["stride"]
        if step is not None and not (_is_number(step) and 0 <= step < _STEPS_MAX and step == int(step)):
            raise _corrupt(path, 8, f"the parameter {name!r} has the step count {step!r}")
        if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
            raise _corrupt(path, 8, f"the parameter {name!r} has no list of the kinds of its state")
        if stride is not None and not (isinstance(stride, list) and all(type(one) is int for one in stride)):
            raise _corrupt(path, 8, f"the parameter {name!r} has the strides {stride!r:.200}")
        found[name] = SavedParameter(
            None if step is None else float(step), tuple(kinds), None if stride is None else tuple(stride)
        )
    return found


def _check_complete(path: Path, there: dict[str, tuple[int, int]], saved: StateFile) -> None:
    """Compare the lists of tensors, extents and parameters. Each must know all state of the others."""
    claimed = [one.tensor for one in saved.extents]
    if len(claimed) != len(set(claimed)):
        raise _corrupt(path, 8, "an extent of state is listed twice")
    unclaimed = [name for name in there if not _PADDING.fullmatch(name)]
    unclaimed = sorted(set(unclaimed).difference(claimed))
    if unclaimed:
        raise _corrupt(path, there[unclaimed[0]][1], f"no extent of state refers to the tensor {unclaimed[0]}")
    for one in saved.extents:
        if one.kind not in saved.parameters.get(one.name, SavedParameter(None, ())).kinds:
            raise _corrupt(path, one.offset, f"the parameter {one.name!r} is listed without its {one.kind}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _open(path: Path) -> _CheckpointReader:
    try:
        return _CheckpointReader(path, None, False)
    except UnsupportedError as error:
        raise _corrupt(path, 0, f"it is not a safetensors file ({error})") from error


def _extent(  # noqa: PLR0917 - as they stand in the file
    path: Path, there: dict[str, tuple[int, int]], name: Any, kind: Any, begin: Any, count: Any, form: str
) -> StateExtent:
    is_stretch = isinstance(name, str) and isinstance(kind, str) and type(begin) is int and type(count) is int
    if not is_stretch:
        raise _corrupt(path, 8, f"{[name, kind, begin, count]!r:.200} is not an extent of state")
    one = StateExtent(name, kind, begin, count, FORMATS[form], 0, path)
    nbytes, offset = there[one.tensor]
    if min(one.begin, one.count) < 0 or one.nbytes != nbytes:
        raise _corrupt(path, offset, f"{one.tensor} has {nbytes} bytes, which do not match {count} elements")
    return replace(one, offset=offset)


def _corrupt(path: Path, offset: int, text: str) -> CorruptFileError:
    error = CorruptFileError(f"{path}: {text}; it is truncated, damaged or another kind of file; use another one")
    error.offset = offset
    return error


class FileGuard:
    """Detects files that change while they are read."""

    def __init__(self, paths: list[Path]) -> None:
        self._before = {path: _version(path) for path in paths}

    def check(self) -> None:
        """Check that the files are unchanged.

        Raises:
            CorruptFileError: a file was replaced or written.
        """
        for path, before in self._before.items():
            if _version(path) != before:
                raise CorruptFileError(f"{path}: the file was replaced while it was loaded; load it again")


def _version(path: Path) -> tuple[int, ...] | None:
    """Return identity, size and modification time of a file; None if `stat` fails, since opening it reports why."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - `path` may be one whose methods are patched
    except OSError as error:
        if is_of_handler(error):
            raise
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class SavedValues:
    """One kind of state of a tensor: its extents in all files, which may overlap."""

    def __init__(self, extents: Iterable[StateExtent]) -> None:
        self._extents = sorted(extents, key=lambda extent: extent.begin)
        self._begins = [extent.begin for extent in self._extents]
        # The largest end so far, in the same order.
        self._ends = list(itertools.accumulate((extent.end for extent in self._extents), max))

    def missing(self, first: int, end: int) -> int | None:
        """Return the first element of a range that no extent has, if there is one."""
        for extent in self._within(first, end):
            if extent.begin > first:
                break
            first = max(first, extent.end)
        return first if first < end else None

    def matching(self, first: int, count: int, form: StateFormat) -> StateExtent | None:
        """Return the extent of exactly these elements in this format."""
        for extent in self._extents[bisect_left(self._begins, first) : bisect_right(self._begins, first)]:
            if extent.count == count and extent.format == form:
                return extent
        return None

    def fill(self, values: torch.Tensor, first: int, kind: StateKind) -> None:
        """Fill at most ``ELEMENTS_MAX`` values with the elements from ``first`` on."""
        for extent in self._within(first, first + len(values)):
            low, high = max(extent.begin, first), min(extent.end, first + len(values))
            # Elements of 8 bits share a scale with others of their block.
            begin = (low - extent.begin) // BLOCK * BLOCK
            found = _read(extent, [(begin, _block_end(extent, high - extent.begin))], kind)
            values[low - first : high - first] = found[low - extent.begin - begin :][: high - low]

    def gather(self, values: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, kind: StateKind) -> None:
        """Set the values at ``targets`` to the elements at ``places``, which ascend."""
        for extent in self._within(int(places[0]), int(places[-1]) + 1):
            low, high = torch.searchsorted(places, torch.tensor([extent.begin, extent.end])).tolist()
            own, into = places[low:high] - extent.begin, targets[low:high]
            blocks = own // BLOCK
            # Whole blocks, adjacent ones at once.
            for some in torch.unique_consecutive(blocks).split(ELEMENTS_MAX // BLOCK):
                low, high = torch.searchsorted(blocks, torch.stack([some[0], some[-1] + 1])).tolist()
                cuts = [0, *((some.diff() > 1).nonzero().flatten() + 1).tolist(), len(some)]
                numbers = some.tolist()
                runs = [
                    (numbers[begin] * BLOCK, _block_end(extent, numbers[end - 1] * BLOCK + 1))
                    for begin, end in itertools.pairwise(cuts)
                ]
                found = _read(extent, runs, kind)
                rank = torch.searchsorted(some, blocks[low:high])
                values[into[low:high]] = found[rank * BLOCK + own[low:high] % BLOCK]

    def _within(self, first: int, end: int) -> Iterator[StateExtent]:
        begin = bisect_right(self._ends, first)
        for extent in itertools.islice(self._extents, begin, bisect_left(self._begins, end)):
            if extent.end > first:
                yield extent


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range at the multiples of ``ELEMENTS_MAX``."""
    while begin < end:
        until = min((begin // ELEMENTS_MAX + 1) * ELEMENTS_MAX, end)
        yield begin, until
        begin = until


class ReorderedValues:
    """The state of a parameter whose elements are counted in another memory order in the files.

    Neighbours here may be anywhere there, so a window of elements is gathered at once, and kept until another one is
    needed.
    """

    def __init__(self, order: MemoryOrder, saved_order: MemoryOrder, saved: Mapping[StateKind, SavedValues]) -> None:
        # Stride in the order here, and in that of the files, from the slowest dimension on.
        strides = zip(order.stride, saved_order.stride, order.shape, strict=True)
        self._strides = sorted(((own, other) for own, other, size in strides if size > 1), reverse=True)
        self._saved = saved
        self._begin = -1
        self._values: dict[StateKind, torch.Tensor] = {}

    def fill(self, values: torch.Tensor, first: int, kind: StateKind, count: int) -> None:
        """Fill values with the elements from ``first`` on, which are in one window, of ``count`` in all."""
        begin = first // ELEMENTS_MAX * ELEMENTS_MAX
        if begin != self._begin:
            self._gather(begin, min(begin + ELEMENTS_MAX, count))
        values.copy_(self._values[kind][first - begin :][: len(values)])

    def _gather(self, begin: int, end: int) -> None:
        self._values.clear()
        self._begin = -1
        rest, places = torch.arange(begin, end), torch.zeros(end - begin, dtype=torch.int64)
        for own, other in self._strides:
            places += rest // own * other
            rest %= own
        places, targets = places.sort()
        for kind, saved in self._saved.items():
            values = torch.empty(end - begin)
            saved.gather(values, places, targets, kind)
            self._values[kind] = values
        self._begin = begin


def _block_end(extent: StateExtent, end: int) -> int:
    return min(-(-end // BLOCK) * BLOCK, extent.count)


def _read(extent: StateExtent, runs: Sequence[tuple[int, int]], kind: StateKind) -> torch.Tensor:
    """Read and decode runs of whole blocks of an extent, one after the other."""
    form, count = extent.format, sum(end - begin for begin, end in runs)
    memory = torch.empty(form.nbytes(count), dtype=torch.uint8)
    size, at, scales = form.dtype.itemsize, 0, form.scales_begin(count)
    items = []
    for begin, end in runs:
        items.append((extent.path, extent.offset + begin * size, memory[at * size : (at + end - begin) * size]))
        if form.has_scales:
            offset = extent.offset + form.scales_begin(extent.count) + begin // BLOCK * 4
            nbytes = -(-(end - begin) // BLOCK) * 4
            items.append((extent.path, offset, memory[scales : scales + nbytes]))
            scales += nbytes
        at += end - begin
    read_batch(items)
    if form is FP32:
        return memory.view(torch.float32)
    values = torch.empty(count)
    decode(form.view(memory, count), values, kind)
    return values
