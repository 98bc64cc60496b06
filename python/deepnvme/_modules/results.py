"""Results of modules that view weights, whose memory is reused."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as tree

if TYPE_CHECKING:
    from collections.abc import Callable


def with_copies(output: Any, is_view: Callable[[Any], bool]) -> Any:
    """Replace the tensors in a module's result that are views by copies, also in data classes and simple objects."""

    def copied(leaf: Any) -> Any:
        if is_view(leaf):
            return leaf.clone()
        if dataclasses.is_dataclass(leaf) or isinstance(leaf, types.SimpleNamespace):
            for name, value in [*vars(leaf).items()]:
                object.__setattr__(leaf, name, with_copies(value, is_view))
        return leaf

    leaves = tree.tree_leaves(output)
    if all(copied(leaf) is leaf for leaf in leaves):
        return output
    return tree.tree_map(copied, output)
