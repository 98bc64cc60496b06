"""Extend griffe, which reads docstrings for the site: examples that begin with `>>>` become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe  # type: ignore[import-not-found,unused-ignore]

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):  # type: ignore[misc,unused-ignore]
    """Fence the examples of each docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object as soon as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """Put fences around examples. Those in a fence of their own stay."""
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [
        EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", part) for part in parts[::2]
    ]
    return "".join(parts)
