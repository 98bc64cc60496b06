"""State files without checksums are complete, or an error names them. Files match each other and the optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme import optim
from deepnvme.errors import CorruptFileError, InvalidArgumentError

NAME = "deepnvme.optimizer"
AdamW, SGD = optim.AdamW, optim.SGD


def make(folder: Path, kind: Any = AdamW, steps: int = 1, **settings: Any) -> Any:
    """Create an optimizer of two parameters with state, and one without."""
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(size)) for size in (9, 300, 5)]
    optimizer = kind(params, **{"lr": 1e-3, **settings}, swap_dir=folder, memory="64KiB")
    for _ in range(steps):
        for param in params[:2]:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a file without checksums."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    told = json.loads(header["__metadata__"][NAME])
    change(told)
    header["__metadata__"][NAME] = json.dumps(told)
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


HARM: dict[str, Callable[[dict[str, Any]], object]] = {
    "no stretches": lambda told: told.update(stretches=[]),
    "a stretch less": lambda told: told["stretches"].pop(),
    "a stretch twice": lambda told: told["stretches"].append(told["stretches"][0]),
    "no parameters": lambda told: told.update(parameters={}),
    "a parameter less": lambda told: told["parameters"].pop("0"),
    "a parameter more": lambda told: told["parameters"].update({"2": told["parameters"]["0"]}),
    "a kind less": lambda told: told["parameters"]["0"]["kinds"].pop(),
    "a kind more": lambda told: told["parameters"]["0"]["kinds"].append("max_exp_avg_sq"),
    "kinds as a text": lambda told: told["parameters"]["0"].update(kinds="exp_avg"),
    "no count": lambda told: told["parameters"]["0"].update(step=None),
    "half a step": lambda told: told["parameters"]["0"].update(step=1.5),
    "more steps than any": lambda told: told["parameters"]["0"].update(step=10**400),
    "a setting of 400 digits": lambda told: told["groups"][0].update(lr=10**400),
    "another setting of 400 digits": lambda told: told["groups"][0].update(unknown=[10**400]),
    "one of a pair": lambda told: told["groups"][0].update(betas=[0.9, 10**400]),
    "a stretch from a text": lambda told: told["stretches"][0].__setitem__(2, "0"),
    "a stretch from half an element": lambda told: told["stretches"][0].__setitem__(2, 0.5),
    "another version": lambda told: told.update(version=2),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_incomplete_state_is_refused(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "state"
    make(tmp_path).save_state(path, checksums=False)
    his = make(tmp_path, steps=2)
    rewrite(path, lambda _: None)
    his.load_state(path)
    rewrite(path, HARM[harm])
    with pytest.raises((CorruptFileError, InvalidArgumentError), match="state"):
        his.load_state(path)
    # Nothing was changed.
    assert his.state_dict()["state"][0]["step"] == 1
    his.step()


def test_a_state_without_moments_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "state"
    make(tmp_path, SGD).save_state(path, checksums=False)
    make(tmp_path, SGD).load_state(path)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [((SGD, {"momentum": 0.9}), (AdamW, {})), ((SGD, {}), (AdamW, {})), ((AdamW, {}), (SGD, {}))],
)
def test_a_state_of_another_optimizer_is_refused(tmp_path: Path, saving: Any, loading: Any) -> None:
    path = tmp_path / "state"
    make(tmp_path, saving[0], **saving[1]).save_state(path)
    his = make(tmp_path, loading[0], **loading[1])
    with pytest.raises(InvalidArgumentError, match="saved it, and this is"):
        his.load_state(path)
    his.step()


def test_settings_that_bring_state_find_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    mine = make(tmp_path, amsgrad=True)
    mine.save_state(path)
    his = make(tmp_path)
    his.load_state(path)
    ours, theirs = (one.state_dict()["state"][0]["max_exp_avg_sq"] for one in (mine, his))
    assert torch.equal(ours, theirs)
    assert ours.any()


def test_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for steps, path in enumerate(paths, 1):
        make(tmp_path, steps=steps).save_state(path)
    with pytest.raises(InvalidArgumentError, match="different steps"):
        make(tmp_path).load_state(paths)
