"""Weights in a stripe set, which a save rewrites under new names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme

from . import plain_module

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def disks(tmp_path: Path) -> deepnvme.StripeSet:
    return deepnvme.StripeSet([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], stripe_bytes=8192)


@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("by_manifest", [False, True])
def test_the_parts_are_those_of_the_last_save(disks: deepnvme.StripeSet, saves: int, by_manifest: bool) -> None:
    for seed in range(saves):
        saved = plain_module.save(disks, seed)
    if by_manifest:
        saved.path = disks.manifest_path
    model = saved.stream()
    with model.streaming:
        assert torch.equal(model(saved.question), saved.answer)


def test_parts_without_a_manifest_are_a_set(tmp_path: Path) -> None:
    whole = plain_module.save(tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    parts = deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes=4096)
    deepnvme.write(torch.frombuffer(bytearray(data), dtype=torch.uint8), parts)
    os.unlink(parts.manifest_path)  # noqa: PTH108
    whole.path = parts
    model = whole.stream()
    with model.streaming:
        assert torch.equal(model(whole.question), whole.answer)


@pytest.mark.parametrize("by_manifest", [False, True])
@pytest.mark.parametrize("change", ["save", "write"])
def test_a_set_that_changes_is_refused(disks: deepnvme.StripeSet, change: str, by_manifest: bool) -> None:
    saved = plain_module.save(disks)
    if by_manifest:
        saved.path = disks.manifest_path
    part = deepnvme.StripeSet.from_manifest(disks.manifest_path).paths[1]
    model = saved.stream()
    with model.streaming:
        model(saved.question)
        if change == "save":
            plain_module.save(disks, 1)
        else:
            with open(part, "r+b") as file:  # noqa: PTH123
                file.write(b"!")
        with pytest.raises(deepnvme.errors.ChangedFileError):
            model(saved.question)
