"""Every public object has a docstring that is enough to use it: arguments, results, errors and an example."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import deepnvme

torch = pytest.importorskip("torch")

MODULES = ["deepnvme", "deepnvme.optim", "deepnvme.nn", "deepnvme.errors", "deepnvme.deepspeed"]
MODULES += [f"deepnvme.integrations.{name}" for name in dir(deepnvme.integrations)]
# Sections of a docstring in Google's style.
SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|Examples):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^    \*{0,2}(\w+): ", re.MULTILINE)
# Errors that point to a fault of the package, not of its caller.
INTERNAL = {"AssertionError", "NotImplementedError", "UnsupportedOperation"}
# Examples that need a GPU or a process of their own: other tests run these.
NOT_RUN = ("gds_handle", "install")


class Documented(NamedTuple):
    """A public object."""

    name: str
    thing: Any
    owner: Any
    """The class that it is found in."""

    @property
    def text(self) -> str:
        return inspect.getdoc(self.thing) or ""

    @property
    def function(self) -> Any:
        """The code that runs when it is called."""
        if inspect.isclass(self.thing):
            return vars(self.thing).get("__init__")
        return inspect.unwrap(self.thing) if callable(self.thing) else None

    def section(self, name: str) -> str:
        parts = SECTION.split(self.text)
        return "".join(text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.startswith(name))


def documented() -> Iterator[Documented]:
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, types.ModuleType | str):
                continue
            full = f"{module_name}.{name}"
            yield Documented(full, thing, None)
            if inspect.isclass(thing):
                yield from members(full, thing)


def members(full: str, kind: type) -> Iterator[Documented]:
    ours = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "deepnvme"]
    names = {name for each in ours for name in vars(each) if not name.startswith("_")}
    for name in sorted(names):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if callable(value) or inspect.isdatadescriptor(value):
            yield Documented(f"{full}.{name}", value, kind)


ALL = {each.name: each for each in documented()}


def is_foreign(each: Documented) -> bool:
    """Whether a base class of another library, or of Python, documents this method."""
    if each.owner is None:
        return False
    name = each.name.rpartition(".")[2]
    return any(name in vars(base) for base in each.owner.__mro__ if base.__module__.partition(".")[0] != "deepnvme")


def is_error(each: Documented) -> bool:
    return inspect.isclass(each.thing) and issubclass(each.thing, BaseException)


def parameters(each: Documented) -> list[str]:
    try:
        signature = inspect.signature(each.thing)
    except (TypeError, ValueError):
        return []
    names = list(signature.parameters)
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def is_made_by_the_package(each: Documented) -> bool:
    """Whether users get such objects from another call, and do not construct them."""
    made = {
        "ActivationOffload",
        "ActivationStats",
        "OffloadPlan",
        "PartPlan",
        "Spilled",
        "BackendProbe",
        "Borrowed",
        "Checkpoint",
        "CheckpointerStats",
        "CommandResult",
        "Gather",
        "ParameterOffload",
    }
    made |= {
        "Probe",
        "Progress",
        "Reader",
        "RowStats",
        "Stats",
        "StreamStats",
        "Streaming",
        "SwapStats",
        "Trace",
        "Transfer",
        "Writer",
    }
    return inspect.isclass(each.thing) and each.name.rpartition(".")[2] in made


@pytest.mark.parametrize("name", ALL)
def test_its_docstring_is_complete(name: str) -> None:
    assert not list(faults(ALL[name]))


def faults(each: Documented) -> Iterator[str]:
    """Everything that a docstring lacks."""
    first = each.text.partition("\n\n")[0].rstrip()
    if not first.endswith("."):
        yield f"its first paragraph is no sentence: {first!r}"
    if inspect.isdatadescriptor(each.thing) and not inspect.isroutine(each.thing):
        return
    if is_error(each) and not has_example(each):
        yield "it has no example"
    if is_error(each) or is_foreign(each):
        return
    if not is_made_by_the_package(each):
        known = {*ARGUMENT.findall(each.section("Args")), *explained_elsewhere(each)}
        yield from (f"it does not document {one}" for one in parameters(each) if one not in known)
        if (errors := raised(each)) and not each.section("Raises"):
            yield f"it raises {sorted(errors)}, and has no section about errors"
    if each.owner is None and not has_example(each):
        yield "it has no example"
    if not says_what_it_returns(each):
        yield "it does not say what it returns"


def explained_elsewhere(each: Documented) -> Iterator[str]:
    """Parameters that the text of the class or of the module explains, for all methods or classes together."""
    places = [each.owner] if each.owner is not None else [importlib.import_module(each.name.rpartition(".")[0])]
    text = "".join(inspect.getdoc(place) or "" for place in places)
    yield from (one for one in parameters(each) if f"`{one}`" in text)


def has_example(each: Documented) -> bool:
    module = importlib.import_module(each.name.rpartition(".")[0])
    is_plugin = module.__name__.startswith("deepnvme.integrations.") and "Example::" in (module.__doc__ or "")
    return ">>>" in each.text or is_plugin


def says_what_it_returns(each: Documented) -> bool:
    if inspect.isclass(each.thing) or not isinstance(each.function, types.FunctionType):
        return True
    is_nothing = each.function.__annotations__.get("return") in (None, "None")
    return is_nothing or re.search(r"\b(Returns?|returns?|Whether|Yields|List)\b", each.text) is not None


def raised(each: Documented) -> set[str]:
    """Return the errors that the code of a function raises itself. The extension checks the types of all arguments."""
    if not isinstance(each.function, types.FunctionType):
        return {"TypeError"} if parameters(each) else set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(each.function)))
    found = set()
    for node in ast.walk(tree):
        error = node.exc if isinstance(node, ast.Raise) else None
        called = error.func if isinstance(error, ast.Call) else error
        name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else None
        if name is not None and (name in vars(builtins) or name.endswith("Error")):
            found.add(name)
    return {name for name in found if name not in INTERNAL and name[0].isupper()}


@pytest.mark.parametrize("name", [name for name in ALL if ">>>" in ALL[name].text])
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(part in NOT_RUN for part in name.split(".")):
        return
    if name == "deepnvme.integrations.transformers.offload":
        pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")
    monkeypatch.chdir(tmp_path)
    names = {"deepnvme": deepnvme, "torch": torch}
    test = doctest.DocTestParser().get_doctest(ALL[name].text, names, name, None, 0)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.DocTestRunner(optionflags=options).run(test).failed == 0
