"""The tensors of a model for the load format ``deepnvme``, without reading the tables that stay on disk."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.iterate import iterate_weights
from deepnvme.integrations._tables.settings import TableSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


def iterate_but_tables(
    files: Sequence[str], *, wanted: Callable[[str], bool] | None = None, **settings: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of safetensors files, but yield those of tables as mappings of their files.

    A mapping has the same elements, and takes no memory until it is used. So a tensor that only looks like one of a
    table is loaded as well as any other.

    Args:
        files: the files.
        wanted: returns whether the tensor of a name is needed. Default: all are.
        settings: as for :func:`deepnvme.integrations.weights.iterate_weights`.

    Returns:
        The name of each tensor and the tensor: first those that are read, and then those of tables. The files are
        opened at once, as by ``iterate_weights``.
    """
    tables = TableSettings.from_environment()
    if not tables.is_enabled:
        return iterate_weights(files, wanted=wanted, **settings)

    def is_wanted(name: str) -> bool:
        return wanted is None or wanted(name)

    read = iterate_weights(
        files, wanted=lambda name: is_wanted(name) and not tables.is_tensor_of_table(name), **settings
    )
    return itertools.chain(read, _mapped(files, lambda name: is_wanted(name) and tables.is_tensor_of_table(name)))


def _mapped(files: Sequence[str], wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    # Both servers bring it.
    from safetensors import safe_open  # noqa: PLC0415

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if wanted(name):
                    yield name, file.get_tensor(name)
