"""The examples in the docstrings run."""

import doctest
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")


def documented() -> Iterator[tuple[str, Any]]:
    """Everything that the package shows, and what belongs to it."""
    yield "deepnvme", deepnvme
    for name in deepnvme.__all__:
        thing = getattr(deepnvme, name)
        if inspect.ismodule(thing) or isinstance(thing, str):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for member in vars(thing):
                value = getattr(thing, member)
                if not member.startswith("_") and (callable(value) or inspect.isdatadescriptor(value)):
                    yield f"{name}.{member}", value


DOCUMENTED = dict(documented())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_everything_is_documented(name: str) -> None:
    text = inspect.getdoc(DOCUMENTED[name])
    assert text
    assert text.partition("\n\n")[0].rstrip().endswith("."), "the first sentence is whole"


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if ">>>" in (inspect.getdoc(DOCUMENTED[name]) or "")])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"deepnvme": deepnvme, "torch": torch, "tensor": torch.randn(1024), "time": time}
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
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
