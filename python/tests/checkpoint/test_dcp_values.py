"""Keys that are not strings return as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepnvme._checkpoint.dcp.values import OwnKeys


def test_dicts_that_a_mapping_makes_anew_keep_their_own_keys() -> None:
    class Fresh(Mapping[str, Any]):
        """Makes a dict for every look, which is gone at the next one."""

        def __getitem__(self, name: str) -> dict[int, str]:
            return {int(name): "x", 100: "y"}

        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[str]:
            return iter(map(str, range(20)))

    keys = OwnKeys(Fresh())
    for number in range(20):
        assert keys.path((str(number), str(number))) == (str(number), number)
