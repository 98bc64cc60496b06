"""The examples in all docstrings of the package run. `test_reference.py` says that public objects have docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deepnvme
from deepnvme import _deepnvme

torch = pytest.importorskip("torch")

# Examples that cannot run everywhere: what they need. DeepSpeed is changed for the whole process by its example.
NEEDS = {"deepnvme.deepspeed.gds.gds_handle": "a GPU", "deepnvme.deepspeed.install": "a process of its own"}
TRAINER = "deepnvme.integrations.transformers.offload"

# Modules whose libraries are not installed. Their own tests run their examples.
NOT_IMPORTED: set[str] = set()


def documented() -> Iterator[tuple[str, Any]]:
    """Yield the public objects and their members."""
    yield "deepnvme", deepnvme
    for name in deepnvme.__all__:
        thing = getattr(deepnvme, name)
        if inspect.ismodule(thing) or isinstance(thing, str):
            continue
        yield name, thing
        yield from members(name, thing)


def members(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    for member in vars(thing) if inspect.isclass(thing) else ():
        value = getattr(thing, member)
        if not member.startswith("_") and (callable(value) or inspect.isdatadescriptor(value)):
            yield f"{name}.{member}", value


def modules() -> Iterator[ModuleType]:
    """Yield every module of the package that can be imported here."""
    yield deepnvme
    for found in pkgutil.walk_packages(deepnvme.__path__, "deepnvme."):
        if found.name != "deepnvme.__main__":
            try:
                yield importlib.import_module(found.name)
            except ImportError as error:
                assert not str(error.name).startswith("deepnvme"), found.name
                NOT_IMPORTED.add(found.name)


def examples() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield every docstring of the package, with the names of its module, unless that is the public one."""
    for module in modules():
        scope = {} if module is deepnvme else vars(module)
        yield module.__name__, module.__doc__ or "", scope
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) == module.__name__ or module is _deepnvme:
                for path, value in ((name, thing), *members(name, thing)):
                    yield f"{module.__name__}.{path}", inspect.getdoc(value) or "", scope


DOCUMENTED = dict(documented())
EXAMPLES = {name: (text, names) for name, text, names in examples() if ">>>" in text}
assert NEEDS.keys() <= EXAMPLES.keys(), "an example that is skipped does not exist"


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.skip(f"needs {NEEDS[name]}")
    if name == TRAINER:
        pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")
    monkeypatch.chdir(tmp_path)
    text, names = EXAMPLES[name]
    given = {"deepnvme": deepnvme, "torch": torch, "tensor": torch.randn(1024), "time": time}
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), {**names, **given}, name, None, 0)
    assert test.examples
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.failed == 0


def test_enough_of_them_have_examples() -> None:
    with_examples = {name for name in DOCUMENTED if ">>>" in (inspect.getdoc(DOCUMENTED[name]) or "")}
    wanted = {
        "deepnvme",
        "Engine",
        "StripeSet",
        "Stats",
        "Probe",
        "open",
        "pinned_empty",
        "as_bytes",
        "Transfer.result",
    }
    wanted |= {f"Engine.{verb}" for verb in ("read", "write", "start_read", "start_write", "read_batch", "write_batch")}
    assert wanted <= with_examples


def example_of(text: str) -> str:
    return text[text.index(">>> ") :]


def test_every_example_is_found() -> None:
    """Look for them in the sources, as a reader does."""
    # From the first prompt on: help adds arguments that several classes share.
    found = {example_of(inspect.cleandoc(text)) for text, _ in EXAMPLES.values()}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    package = Path(deepnvme.__file__).parent
    absent = {package.parent / f"{name.replace('.', '/')}.py" for name in NOT_IMPORTED}
    for path in {*package.rglob("*.py")} - absent:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            assert text is None or ">>> " not in text or example_of(text) in found, f"{path.name}: {text}"
