"""A model's parameter whose rows are on disk. A copy into it records the place of its source; a look-up reads rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme.errors import UnsupportedError
from deepnvme.integrations._tables.table import DiskTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_ops = torch.ops.aten


class RowWeight(torch.Tensor):
    """A tensor without memory, in place of an embedding's weight.

    A server's own code shards, copies and looks up: copying a part of a checkpoint's tensor records its place in the
    file, and ``embedding`` or an index read the rows. All other operations are errors.

    Args:
        table: the table on disk.
    """

    table: DiskTable
    """The table on disk."""
    first: int
    """Number of its first row in the table."""

    def __new__(cls, table: DiskTable, first: int = 0, rows: int | None = None) -> Self:
        """Make a tensor of the rows of a table, or of some of them."""
        shape = (table.rows if rows is None else rows, table.columns)
        # On the CPU: loaders would move the tensors of a checkpoint to another device before they copy them.
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 (documented for this)
        self: Self = make(cls, shape, dtype=table.dtype, device="cpu")
        self.table, self.first = table, first
        return self

    def window(self, start: int, end: int) -> RowWeight:
        """Return some of its rows."""
        return RowWeight(self.table, self.first + start, end - start)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"RowWeight({self.table.name}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, _memo: object) -> NoReturn:
        refuse(self.table.name, "a copy")

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        refuse(self.table.name, "pickling")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        given = [each for each in args if isinstance(each, RowWeight)]
        if handler is None or not given:
            name = given[0].table.name if given else "a table"
            refuse(name, str(func))
        return handler(*args, **(kwargs or {}))


def refuse(name: str, operation: str) -> NoReturn:
    """Raise the error of an operation other than a look-up."""
    msg = (
        f"{name}: its rows are on disk, so that they can only be looked up, and {operation} is something else. An "
        "embedding that is tied to the LM head, quantised, adapted by LoRA or changed at run time must stay in memory: "
        "leave it out of DEEPNVME_TABLES"
    )
    raise UnsupportedError(msg)


def _same(weight: RowWeight, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> RowWeight:
    if dtype not in {None, weight.dtype}:
        refuse(weight.table.name, f"a conversion to {dtype}")
    return weight.window(0, weight.shape[0])


def _empty_like(weight: RowWeight, dtype: torch.dtype | None = None, **_: Any) -> RowWeight:
    # A loader that finds out that the checkpoint has another dtype.
    if dtype is not None:
        weight.table.change_dtype(dtype)
    return RowWeight(weight.table, weight.first, weight.shape[0])


def _slice(
    weight: RowWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RowWeight:
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    if step != 1 or (dim % 2 == 1 and (first, last) != (0, weight.shape[1])):
        refuse(weight.table.name, "a part of its columns")
    return _same(weight) if dim % 2 else weight.window(first, max(first, last))


def _copy(weight: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(weight, RowWeight):
        assert isinstance(source, RowWeight)
        refuse(source.table.name, "a copy of it")
    if isinstance(source, RowWeight):
        if source.table is not weight.table or source.first != weight.first:
            refuse(weight.table.name, "a copy of another table")
        return weight
    if source.shape != weight.shape:
        msg = f"{weight.table.name}: {tuple(source.shape)} rows were copied to {tuple(weight.shape)}"
        raise UnsupportedError(msg)
    weight.table.record(weight.first, source)
    return weight


def _fill(weight: RowWeight, value: Any = 0) -> RowWeight:
    if value != 0:
        refuse(weight.table.name, f"filling it with {value}")
    weight.table.clear(weight.first, weight.shape[0])
    return weight


def _embedding(weight: RowWeight, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return weight.table.gather(ids if weight.first == 0 else ids + weight.first)


def _index(weight: RowWeight, indices: list[torch.Tensor | None]) -> torch.Tensor:
    (ids,) = indices if len(indices) == 1 else (None,)
    if ids is None or ids.dtype == torch.bool:
        refuse(weight.table.name, "an index that is no list of rows")
    return _embedding(weight, ids)


def _index_select(weight: RowWeight, dim: int, ids: torch.Tensor) -> torch.Tensor:
    if dim % 2:
        refuse(weight.table.name, "a choice of columns")
    return _embedding(weight, ids)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _ops.detach.default: _same,
    _ops.alias.default: _same,
    _ops._to_copy.default: _same,  # noqa: SLF001 (its name)
    _ops.empty_like.default: _empty_like,
    _ops.slice.Tensor: _slice,
    _ops.copy_.default: _copy,
    _ops.fill_.Scalar: _fill,
    _ops.zero_.default: _fill,
    _ops.embedding.default: _embedding,
    _ops.index.Tensor: _index,
    _ops.index_select.default: _index_select,
    _ops.is_pinned.default: lambda _weight, _device=None: False,
}


def row_parameter(table: DiskTable, like: torch.Tensor | None = None) -> torch.nn.Parameter:
    """Make a parameter of a table.

    Args:
        table: the table.
        like: the parameter that it replaces. Its attributes are copied, such as the function that loads it.
    """
    parameter = torch.nn.Parameter(RowWeight(table), requires_grad=False)
    for name, value in vars(like).items() if like is not None else ():
        if name not in {"table", "first"}:
            setattr(parameter, name, value)
    return parameter


def ids_of_tables(module: torch.nn.Module) -> set[int]:
    """Return the ids of a module's parameters that belong to tables on disk, with scales that are in memory."""
    owners = [
        part for part in module.modules() if any(isinstance(each, RowWeight) for each in part.parameters(recurse=False))
    ]
    return {id(each) for owner in owners for each in owner.parameters(recurse=False)}
