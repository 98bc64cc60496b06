"""Copy the docstrings of the extension into its stub file. Documentation and editors read them there.

    python scripts/stubs.py           # write python/deepnvme/_deepnvme.pyi
    python scripts/stubs.py --check   # exit status 1 if it would change

The texts come from the built module, so from the ``///`` comments of python/src. Signatures stay as they are.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python/deepnvme/_deepnvme.pyi"
INDENT = "    "
Documented = ast.ClassDef | ast.FunctionDef


def main(arguments: list[str]) -> int:
    """Write the stub file, or check it."""
    from deepnvme import _deepnvme  # noqa: PLC0415

    before = STUB.read_text()
    after = with_docstrings(before, _deepnvme)
    if before == after:
        return 0
    if "--check" in arguments:
        print(f"{STUB.relative_to(ROOT)}: its docstrings are not those of python/src; run: python scripts/stubs.py")
        return 1
    STUB.write_text(after)
    return 0


def with_docstrings(stub: str, module: Any) -> str:
    """Return a stub file with the docstrings of a module."""
    lines = stub.splitlines()
    # From the end, so that the line numbers of the others stay valid.
    for node, thing in sorted(found(ast.parse(stub).body, module), key=lambda pair: -pair[0].lineno):
        text = inspect.getdoc(thing)
        if text is not None:
            replace(lines, node, text)
    return "\n".join(lines) + "\n"


def found(nodes: list[ast.stmt], owner: Any) -> Iterator[tuple[Documented, Any]]:
    """Yield the public classes and functions of a stub file, and their objects."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            thing = inspect.getattr_static(owner, node.name)
            thing = thing.__func__ if isinstance(thing, staticmethod) else thing
            yield node, thing
            if isinstance(node, ast.ClassDef):
                yield from found(node.body, thing)


def replace(lines: list[str], node: Documented, text: str) -> None:
    """Replace the docstring of a class or function, or its empty body, by another docstring, or add one."""
    indent = " " * node.col_offset + INDENT
    first = node.body[0]
    assert first.end_lineno is not None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    new = docstring(text, indent)
    if not is_text:
        # Above the first statement, and its decorators.
        start = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
        lines[start:start] = [*new, ""]
        return
    # A body of `...` stands in the line of the signature, or in its own.
    head = lines[first.lineno - 1][: first.col_offset].rstrip()
    lines[first.lineno - 1 : first.end_lineno] = [head, *new] if head else new


def docstring(text: str, indent: str) -> list[str]:
    """Return the lines of a docstring."""
    quotes = 'r"""' if "\\" in text else '"""'
    first, *rest = text.splitlines()
    if not rest:
        return [f'{indent}{quotes}{first}"""']
    return [f"{indent}{quotes}{first}", *(f"{indent}{line}".rstrip() for line in rest), f'{indent}"""']


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
