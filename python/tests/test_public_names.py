"""The names of the package: what ``dir`` shows, which module a function names, and what needs no import of its own."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import deepnvme

MODULES = ("deepspeed", "errors", "integrations", "optim")
FUNCTIONS = [
    name
    for name in deepnvme.__all__
    if isinstance(getattr(deepnvme, name, None), types.FunctionType | types.BuiltinFunctionType)
]


def test_dir_shows_the_public_names_only() -> None:
    assert set(dir(deepnvme)) == {*deepnvme.__all__, *MODULES}
    assert not [name for name in dir(deepnvme) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_name_the_package_as_their_module(name: str) -> None:
    assert getattr(deepnvme, name).__module__ == "deepnvme"


def test_functions_of_every_kind_are_tested() -> None:
    assert {"read", "open", "report", "as_bytes", "save", "load", "stream", "offload_parameters"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_there_without_an_import(name: str) -> None:
    code = f"import deepnvme; assert deepnvme.{name}.__name__ == 'deepnvme.{name}'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_import_brings_neither_torch_nor_what_is_used_later() -> None:
    late = [f"deepnvme.{name}" for name in ("deepspeed", "integrations", "optim", "_checkpoint", "_stream", "_swap")]
    code = f"import sys, deepnvme; print([name for name in {['torch', 'numpy', *late]} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
