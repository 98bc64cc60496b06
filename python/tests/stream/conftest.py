"""Fixtures for the tests of streamed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

from . import plain_module
from .small_models import SmallModels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        yield


@pytest.fixture(scope="package", autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small models gain nothing from more threads, and suffer from other load on the machine."""
    with threads(1):
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return SmallModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def saved(tmp_path: Path) -> plain_module.Saved:
    return plain_module.save(tmp_path / "weights.safetensors")


@pytest.fixture
def streamed() -> Iterator[Callable[..., Any]]:
    """Stream a model, and close it after the test."""
    models: list[Any] = []

    def call(*arguments: Any, **options: Any) -> Any:
        models.append(deepnvme.stream(*arguments, **options))
        return models[-1]

    yield call
    for model in models:
        model.streaming.close()


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
