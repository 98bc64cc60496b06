"""Code that catches any exception lets those of signal handlers through."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(deepnvme.__file__).parent
ON_A_THREAD = "it runs on a thread of its own, where no signal handler runs"
RAISED_LATER = "whatever it is, it is raised later"

# By file and function: why it need not ask.
OTHERS = {
    ("_checkpoint/background_save.py", "_run"): ON_A_THREAD,
    ("_checkpoint/background_save.py", "abandon"): "an error of its own is being raised",
    ("_checkpoint/dcp/reader.py", "read_metadata"): RAISED_LATER,
    ("_checkpoint/distributed/parts.py", "attempt"): RAISED_LATER,
    ("_checkpoint/distributed/process_group.py", "_timeout_of"): "attributes only, and a default if there are none",
    ("_checkpoint/history.py", "publish"): RAISED_LATER,
}


def broad_catches(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the function of each catch of any ``Exception``, and whether it lets a handler's through."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]

    def function_of(node: ast.AST) -> str:
        around = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]  # type: ignore[attr-defined]
        return around[-1].name if around else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception":
            last = node.body[-1]
            raises_it = isinstance(last, ast.Raise) and last.exc is None
            yield function_of(node), raises_it or "is_of_handler(" in ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node) == "suppress(Exception)":
            yield function_of(node), False


def test_each_broad_catch_asks_whether_a_handler_raised() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), function)
        for path in ROOT.rglob("*.py")
        for function, lets_through in broad_catches(path)
        if not lets_through
    }
    assert found == OTHERS.keys()
