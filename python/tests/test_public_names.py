"""The names of the package: what ``dir`` shows, which module a function names, and what needs no import of its own."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import types

import pytest

import deepnvme

MODULES = ("deepspeed", "errors", "integrations", "nn", "optim")
FUNCTIONS = [
    name
    for name in deepnvme.__all__
    if isinstance(getattr(deepnvme, name, None), types.FunctionType | types.BuiltinFunctionType)
]


def test_dir_shows_the_public_names_only() -> None:
    assert set(dir(deepnvme)) == {*deepnvme.__all__, *MODULES}
    assert not [name for name in dir(deepnvme) if name.startswith("_") and name != "__version__"]


PUBLIC_MODULES = [
    "deepnvme.deepspeed", "deepnvme.errors", "deepnvme.integrations.dcp",
    "deepnvme.integrations.sglang", "deepnvme.integrations.sglang_loader", "deepnvme.integrations.transformers",
    "deepnvme.integrations.vllm", "deepnvme.integrations.weights", "deepnvme.optim",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_dir_of_each_module_shows_its_public_names_only(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)


def test_dir_of_the_integrations_shows_modules_only() -> None:
    folder = pathlib.Path(deepnvme.integrations.__file__).parent
    assert dir(deepnvme.integrations) == sorted(path.stem for path in folder.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", deepnvme.__all__)
def test_objects_name_the_package_as_their_module(name: str) -> None:
    if name not in vars(deepnvme):
        pytest.importorskip("torch")
    thing = getattr(deepnvme, name)
    if not isinstance(thing, types.ModuleType | str) and name not in deepnvme.errors.__all__:
        assert thing.__module__ == "deepnvme"
    if isinstance(thing, type) and name not in deepnvme.errors.__all__:
        assert repr(thing) == f"<class 'deepnvme.{name}'>"


@pytest.mark.parametrize("name", ["optim", "nn", "deepspeed", "integrations.dcp"])
def test_objects_of_other_modules_name_these(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(f"deepnvme.{name}")
    for public in module.__all__:
        assert getattr(module, public).__module__.startswith(f"deepnvme.{name}")
        assert "._" not in getattr(module, public).__module__


def test_functions_of_every_kind_are_tested() -> None:
    assert {"read", "open", "report", "as_bytes", "save", "load", "stream", "offload_parameters"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_there_without_an_import(name: str) -> None:
    code = f"import deepnvme; assert deepnvme.{name}.__name__ == 'deepnvme.{name}'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_import_brings_neither_torch_nor_modules_for_later() -> None:
    late = [
        f"deepnvme.{name}"
        for name in ("deepspeed", "integrations", "nn", "optim", "_checkpoint", "_rows", "_stream", "_swap")
    ]
    large = ["torch", "numpy", "asyncio", "deepspeed", "ctypes", "inspect"]
    code = f"import sys, deepnvme; print([name for name in {[*large, *late]} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
