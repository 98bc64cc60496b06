"""Gather rows of tables on disk for a model on a GPU: through host memory, into a tensor that has only these rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from deepnvme._deepnvme import _RowStore
from deepnvme._stream.parameter_binding import ParameterBinding, checked_wrapper
from deepnvme._stream.weight_origin import FLOATS
from deepnvme._utils.devices import relaxed_capture_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepnvme._modules.partition import RowLookup
    from deepnvme._stream.calling_threads import RunningCalls
    from deepnvme._stream.original_weights import ChangedBuffers
    from deepnvme._stream.weight_origin import Origin, WeightFiles

# A table has at least memory for this many rows, and for this many bytes.
_ROWS_MIN, _BYTES_MIN = 64, 1 << 20


class GatheredRows:
    """Gather the rows that an embedding looks up, each time that it runs.

    Args:
        lookups: the embeddings.
        files: the files of their weights. Each has an origin that can be gathered.
        memory: bytes of host memory for rows that are used often.
        device: the device of the model.
        calls: counts the calls of the modules.
        changed: the buffers that the modules have changed.
    """

    def __init__(
        self,
        lookups: Sequence[RowLookup],
        files: WeightFiles,
        memory: int,
        device: torch.device,
        *,
        calls: RunningCalls,
        changed: ChangedBuffers,
    ) -> None:
        self.memory, self._device = memory, device
        self._stores: list[_RowStore] = []
        self._origins = [files.origin_of[lookup.weights[0].name] for lookup in lookups]
        total = sum(origin.nbytes for origin in self._origins)
        for index, (lookup, origin) in enumerate(zip(lookups, self._origins, strict=True)):
            row_bytes = _row_bytes(origin)
            share = max(memory * origin.nbytes // total, _ROWS_MIN * row_bytes, _BYTES_MIN)
            sources = sorted({each.source for each in origin.ranges})
            ranges = [(sources.index(each.source), each.offset, each.nbytes // row_bytes) for each in origin.ranges]
            paths = [files.sources[source] for source in sources]
            self._stores.append(_RowStore(paths, (ranges, row_bytes), None, None, share, files.engine))
            binding = ParameterBinding(lookup.weights, device, calls, changed)
            binding.set_look_up(calls.counted(functools.partial(self._look_up, index)))
            calls.wrap(lookup.module, checked_wrapper(lookup.name, binding))

    def stats(self) -> dict[str, float]:
        """Return the counters of rows that were in host memory, and of those that were read."""
        counters = [store.stats() for store in self._stores]
        names = {"row_hits": "hits", "row_waits": "rows_read", "row_fetches": "reads", "bytes_read": "bytes_read"}
        return {name: sum(counted[theirs] for counted in counters) for name, theirs in names.items()}

    def clear(self) -> None:
        """Close all tables. No module runs."""
        for store in self._stores:
            store.close()

    def _look_up(
        self, index: int, indices: torch.Tensor, embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        origin = self._origins[index]
        used, places = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
        if len(used) and not 0 <= int(used[0]) <= int(used[-1]) < origin.shape[0]:
            msg = "index out of range in self"
            raise IndexError(msg)
        rows = torch.empty(len(used), *origin.shape[1:], dtype=origin.memory_dtype, device=self._device)
        conversion = None if origin.cast_to is None else (FLOATS[origin.dtype], FLOATS[origin.cast_to], None)
        with relaxed_capture_for(rows.device):
            self._stores[index].gather((used, (True, used.element_size()), rows, conversion))
        return embed(rows, places.to(indices.device))


def can_gather(origin: Origin) -> bool:
    """Whether rows of a weight can be gathered: they lie whole in ranges of files, in a type that can be cast."""
    is_castable = origin.cast_to is None or (origin.dtype in FLOATS and origin.cast_to in FLOATS)
    is_plain = all(each.encoded is None for each in origin.ranges)
    return is_castable and is_plain and all(each.nbytes % _row_bytes(origin) == 0 for each in origin.ranges)


def _row_bytes(origin: Origin) -> int:
    return origin.nbytes // origin.shape[0]
