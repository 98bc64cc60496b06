"""Tables of rows on disk: :class:`RowStore`."""

from deepnvme._rows.gather import Gather
from deepnvme._rows.row_store import RowStats, RowStore

__all__ = ["Gather", "RowStats", "RowStore"]
