"""A group that has a name of its own changes neither the names nor the count of torch's groups."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from deepnvme._checkpoint.distributed.process_group import _OwnName


def name_a_group(world: SimpleNamespace) -> str:
    """Name a group as torch does."""
    name = str(world.group_count)
    world.group_count += 1
    return name


def test_only_the_block_has_the_name_and_only_others_count() -> None:
    world = SimpleNamespace(group_count=3)
    with _OwnName(world, "ours"):
        assert name_a_group(world) == "ours"
        names: list[str] = []
        other = threading.Thread(target=lambda: names.append(name_a_group(world)))
        other.start()
        other.join()
    assert names == ["3"]
    assert name_a_group(world) == "4"
    assert world.group_count == 5


def test_a_refused_group_leaves_the_count() -> None:
    world = SimpleNamespace(group_count=0)
    with _OwnName(world, "ours"):
        pass
    assert [name_a_group(world), name_a_group(world)] == ["0", "1"]
