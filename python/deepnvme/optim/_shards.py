"""Names and first elements of parameters that are parts of whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepnvme._utils.arguments import WHOLE_MAX, whole
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from deepnvme.optim._optimizer import OptimizerBase
    from deepnvme.optim._state_store import Shards


def shards_of(optimizer: OptimizerBase, shards: Shards | None) -> dict[torch.nn.Parameter, tuple[str, int]]:
    """Return the name and the first element of each parameter, as a file can have them.

    Raises:
        InvalidArgumentError: one is missing, or is not a pair of a name and an index.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if shards is None:
        return {param: (str(index), 0) for index, param in enumerate(params)}
    if not isinstance(shards, Mapping):
        raise InvalidArgumentError(f"shards is {shards!r:.100}; it must be a dict: {{param: (name, first_element)}}")
    missing = sum(param not in shards for param in params)
    if missing:
        msg = f"shards has no name for {missing} of {len(params)} parameters; name each parameter of the optimizer"
        raise InvalidArgumentError(msg)
    return {param: _shard(shards[param], param.numel()) for param in params}


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


def check_disjoint(shards: Mapping[torch.nn.Parameter, tuple[str, int]]) -> None:
    """Refuse parameters that are the same elements of a tensor: a file has one value for each.

    Raises:
        InvalidArgumentError: two of them overlap.
    """
    ranges = sorted((name, first, first + param.numel()) for param, (name, first) in shards.items() if param.numel())
    for (name, begin, end), (other, first, last) in itertools.pairwise(ranges):
        if name == other and first < end:
            raise InvalidArgumentError(
                f"shards has two parameters for elements of {name!r}: {begin} to {end - 1} and {first} to {last - 1}; "
                "give each parameter elements of its own"
            )
