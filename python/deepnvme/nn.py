"""Modules whose weights are on disk.

Example:
    >>> size = deepnvme.save({"weight": torch.arange(40.0).reshape(10, 4)}, "embedding.safetensors")
    >>> table = deepnvme.RowStore("embedding.safetensors", "weight", memory="1MB")
    >>> deepnvme.nn.DiskEmbedding(table)(torch.tensor([2, 0]))
    tensor([[ 8.,  9., 10., 11.],
            [ 0.,  1.,  2.,  3.]])
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from deepnvme._rows.row_store import RowStore
from deepnvme._utils.public import shown
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from deepnvme._rows.gather import Gather

__all__ = ["DiskEmbedding"]


class DiskEmbedding(torch.nn.Module):
    """Look up rows of a table on disk, in place of ``torch.nn.Embedding``. It has no parameters, and no gradients.

    It replaces the look-up only. Its ``weight`` is an empty tensor, so an output layer that is tied to the embedding,
    and other code that reads ``weight``, does not work with it. The result is on the device of the ids.

    Args:
        table: a ``RowStore`` whose rows are one-dimensional.
        padding_idx: the id whose result is zeros. A negative ``padding_idx`` counts from the last row; ids must not be
            negative. Default: none.
        scale: one number by which every element is multiplied, as some models do. Default: none.
        dtype: the dtype of the result. Default: the table's ``gathered_dtype``. ``to(dtype)`` changes it.

    Raises:
        TypeError: ``table`` is no :class:`~deepnvme.RowStore`.
        ValueError: its rows are not one-dimensional, or ``padding_idx`` is out of range.

    Example:
        >>> size = deepnvme.save({"weight": torch.ones(10, 4)}, "embedding.safetensors")
        >>> table = deepnvme.RowStore("embedding.safetensors", "weight", memory="1MB")
        >>> module = deepnvme.nn.DiskEmbedding(table, padding_idx=0, scale=3.0)
        >>> module(torch.tensor([[0, 5]]))
        tensor([[[0., 0., 0., 0.],
                 [3., 3., 3., 3.]]])
    """

    def __init__(
        self,
        table: RowStore,
        *,
        padding_idx: int | None = None,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given: object = table
        if not isinstance(given, RowStore):
            msg = f"table must be a deepnvme.RowStore, not {shown(table)}"
            raise TypeError(msg)
        if len(table.shape) != 2:  # noqa: PLR2004 (rows and columns)
            msg = f"the table has the shape {table.shape}; an embedding has rows and columns"
            raise InvalidArgumentError(msg)
        if padding_idx is not None:
            padding_idx = operator.index(padding_idx)
            if not -len(table) <= padding_idx < len(table):
                msg = f"padding_idx is {padding_idx}, and the table has {len(table)} rows"
                raise InvalidArgumentError(msg)
        self.table = table
        self.num_embeddings, self.embedding_dim = table.shape
        self.padding_idx = None if padding_idx is None else padding_idx % len(table)
        self.scale = scale
        # Models move ids to the device of this, and `to` changes its dtype.
        self.weight: torch.Tensor
        self.register_buffer(
            "weight", torch.empty(0, self.embedding_dim, dtype=dtype or table.gathered_dtype), persistent=False
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows for ``ids``.

        Args:
            ids: row numbers, in a tensor of any shape.

        Returns:
            A tensor of the shape ``(*ids.shape, embedding_dim)``, on the device of ``ids``.

        Raises:
            IndexError: an id is negative, or too large; the message names it and its position.
            TypeError: ids are not a tensor of integers.
            ChangedFileError: the file was replaced, or written to, since the table was opened.
            ClosedError: the table is closed, or was opened in the parent of this forked process.
            ChecksumError: a block of a packed table is damaged.
            OSError: a read failed.

        Example:
            >>> size = deepnvme.save({"weight": torch.ones(10, 4)}, "embedding.safetensors")
            >>> table = deepnvme.RowStore("embedding.safetensors", "weight", memory="1MB")
            >>> deepnvme.nn.DiskEmbedding(table)(torch.tensor([3]))
            tensor([[1., 1., 1., 1.]])
        """
        return self._finish(ids, self.start(ids))

    def start(self, ids: torch.Tensor) -> Gather:
        """Start reading the rows of ``ids``, so that other work can run meanwhile.

        Args:
            ids: row numbers, in a tensor of any shape.

        Returns:
            The :class:`~deepnvme.Gather` in flight. Unlike ``forward``, its result does not zero the rows of padding;
            ``scale`` and ``dtype`` are applied.

        Raises:
            IndexError, TypeError, ClosedError: as in :meth:`RowStore.gather <deepnvme.RowStore.gather>`.

        Example:
            >>> size = deepnvme.save({"weight": torch.ones(10, 4)}, "embedding.safetensors")
            >>> table = deepnvme.RowStore("embedding.safetensors", "weight", memory="1MB")
            >>> deepnvme.nn.DiskEmbedding(table).start(torch.tensor([3])).result()
            tensor([[1., 1., 1., 1.]])
        """
        given: object = ids
        if not isinstance(given, torch.Tensor):
            msg = f"ids must be a torch tensor, as of torch.nn.Embedding, not {shown(ids)}"
            raise TypeError(msg)
        out = torch.empty(*ids.shape, self.embedding_dim, dtype=self.weight.dtype, device=ids.device)
        return self.table.start_gather(ids, out=out, scale=self.scale)

    def _finish(self, ids: torch.Tensor, gather: Gather) -> torch.Tensor:
        rows = gather.result()
        if self.padding_idx is not None:
            # Zeros of all dtypes are bytes of zeros, and torch cannot fill all dtypes.
            bits = rows.view(torch.uint8)
            bits.masked_fill_((ids == self.padding_idx).unsqueeze(-1).to(rows.device), 0)
        return rows

    def extra_repr(self) -> str:
        """Describe the table."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
