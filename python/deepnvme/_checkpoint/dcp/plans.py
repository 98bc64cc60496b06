"""Compare the save plans of the ranks, choose the rank that saves an entry which several have, and name missing ones.

Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from deepnvme._utils.public import first_of
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

# Tensors from this size on are written by any rank that has them, so that all write about the same. Smaller ones may
# differ, and are those of the first rank that has them, as in checkpoints of one file.
SAME_BYTES_MIN = 256 << 10


class ComparingPlanner(DefaultSavePlanner):
    """Compares the plans of all ranks before torch drops what several of them have.

    Args:
        name: returns the name of a rank, for errors.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__()
        self._name = name

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Make the plan of each rank, on the coordinator."""
        check_plans(all_plans, self._name)
        return super().create_global_plan(leave_to_first(all_plans))


class NamingPlanner(DefaultLoadPlanner):
    """Names all tensors and values that the checkpoint lacks, and some that it has.

    Args:
        checkpoint: the checkpoint, for errors.
    """

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def create_local_plan(self) -> LoadPlan:
        """Make the plan of this rank.

        Raises:
            KeyError: the checkpoint has no tensor or value of a name.
        """
        try:
            return super().create_local_plan()
        except RuntimeError as error:
            found = self.metadata.state_dict_metadata if self.metadata else {}
            missing = [name for name in self.state_dict if name not in found]
            if not missing:
                raise
            others = [name for name in found if name not in self.state_dict] or list(found)
            there = first_of(sorted(others)) or "none"
            msg = f"{self._checkpoint}: there is no tensor {first_of(sorted(missing))}; there are {there}"
            raise KeyError(msg) from error


def check_plans(plans: Sequence[SavePlan], name: Callable[[int], str]) -> None:
    """Raise if two ranks describe one entry differently.

    Raises:
        InvalidArgumentError: a tensor has another dtype or size at one of the ranks, or is no tensor there.
    """
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            known_rank, known = first.setdefault(item.index.fqn, (rank, _description(item)))
            for what, value in _description(item).items():
                if known[what] != value:
                    msg = (
                        f"{item.index.fqn}: its {what} is {value} at {name(rank)} and {known[what]} at "
                        f"{name(known_rank)}; it must be the same everywhere"
                    )
                    raise InvalidArgumentError(msg)


def leave_to_first(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Drop small entries from all plans but the first that has them, so that its values are saved."""
    taken: set[Any] = set()
    left = []
    for plan in plans:
        left.append(dataclasses.replace(plan, items=[item for item in plan.items if item.index not in taken]))
        taken.update(item.index for item in plan.items if (item.tensor_storage_size() or 0) < SAME_BYTES_MIN)
    return left


def _description(item: WriteItem) -> dict[str, Any]:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return {"kind": "an object", "dtype": None, "size": None}
    data = item.tensor_data
    return {"kind": "a tensor", "dtype": data.properties.dtype, "size": tuple(data.size)}
