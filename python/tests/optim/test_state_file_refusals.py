"""State of other optimizers and models, and invalid settings, are refused before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import optim
from deepnvme.errors import CorruptFileError, InvalidArgumentError

SHAPES = [(40, 50), (33,)]


def params(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def stepped(optimizer: torch.optim.Optimizer) -> Any:
    generator = torch.Generator().manual_seed(5)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("shapes", [[(100, 100)], [(7,), (127, 129)], [(64,), (40, 50), (3,)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_that_is_there_before_the_first_step(
    tmp_path: Path, moments: Any, shapes: Any, dtype: torch.dtype
) -> None:
    """Adagrad's sums move to another place when the first step adds the fp32 weights."""
    options: Any = {"swap_dir": tmp_path, "memory": "1MB", "moments": moments}
    first = params(shapes, dtype)
    saved = stepped(optim.Adagrad(first, **options))
    saved.save_state(tmp_path / "state")
    second = [torch.nn.Parameter(param.detach().clone()) for param in first]
    for memory in ("1MB", "2MB", "300KB"):
        other = optim.Adagrad(second, **{**options, "memory": memory})
        other.load_state(tmp_path / "state", verify="full")
        there, expected = other.state_dict()["state"], saved.state_dict()["state"]
        assert all(
            torch.equal(there[index][name], value) for index in expected for name, value in expected[index].items()
        )
        other.close()
    resumed = optim.Adagrad(second, **options)
    resumed.load_state(tmp_path / "state")
    stepped(saved), stepped(resumed)
    assert all(map(torch.equal, first, second))
    saved.close()
    resumed.close()


def test_named_parameters_and_ways_to_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    options: Any = {"swap_dir": tmp_path, "memory": "1MB"}
    named = stepped(optim.AdamW(model.named_parameters(), **options))
    named.save_state(tmp_path / "state")
    expected = named.state_dict()["state"]
    named.close()
    for other in (
        optim.AdamW(model.named_parameters(), **options),
        optim.AdamW(model.parameters(), **options),
        optim.AdamW(model.parameters(), fused=True, **options),
        optim.AdamW(model.parameters(), foreach=False, **options),
    ):
        other.load_state(tmp_path / "state")
        state = other.state_dict()["state"]
        assert all(torch.equal(state[index]["exp_avg"], expected[index]["exp_avg"]) for index in expected)
        other.close()


def test_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    options: Any = {"swap_dir": tmp_path, "memory": "1MB"}
    kinds: dict[str, Any] = {
        "Adam": optim.Adam, "AdamW": optim.AdamW, "Adagrad": optim.Adagrad, "Lion": optim.Lion, "SGD": optim.SGD,
    }  # fmt: skip
    for name, kind in kinds.items():
        settings = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
        saved = stepped(kind(params(SHAPES), **settings, **options))
        saved.save_state(tmp_path / "state")
        saved.close()
        for other, made in kinds.items():
            if other == name:
                continue
            optimizer = made(params(SHAPES), lr=0.1, **options)
            with pytest.raises(InvalidArgumentError, match=f"state: {name} saved it, and this is {other}"):
                optimizer.load_state(tmp_path / "state")
            stepped(optimizer).close()
    saved = stepped(optim.AdamW(params(SHAPES), **options))
    saved.save_state(tmp_path / "state")
    saved.close()
    for shapes in ([(40, 49), (33,)], [(50, 40), (33,)], [(2000,), (33,)], [(40, 50)], [*SHAPES, (5,)], SHAPES[::-1]):
        optimizer = optim.AdamW(params(shapes), **options)
        with pytest.raises(InvalidArgumentError, match=r"state: .*another model's"):
            optimizer.load_state(tmp_path / "state")
        assert not optimizer.state
        stepped(optimizer).close()


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ('\\"lr\\": 0.001', '\\"lr\\":-0.001'),
        ('\\"lr\\": 0.001', '\\"lr\\":   NaN'),
        ("[0.9, 0.999]", "[0.9, 9.999]"),
        ('\\"eps\\": 1e-08', '\\"eps\\":-1e-08'),
        ('\\"capturable\\": false', '\\"capturable\\":  true'),
    ],
)
def test_settings_that_no_step_takes(tmp_path: Path, said: str, instead: str) -> None:
    options: Any = {"swap_dir": tmp_path, "memory": "1MB"}
    saved = stepped(optim.AdamW(params(SHAPES), lr=0.001, **options))
    saved.save_state(tmp_path / "state", checksums=False)
    saved.close()
    data = (tmp_path / "state").read_bytes()
    assert data.count(said.encode()) == 1
    (tmp_path / "state").write_bytes(data.replace(said.encode(), instead.encode()))
    optimizer = optim.AdamW(params(SHAPES), lr=0.5, **options)
    with pytest.raises(CorruptFileError, match=r"state: "):
        optimizer.load_state(tmp_path / "state")
    assert optimizer.param_groups[0]["lr"] == 0.5
    stepped(optimizer).close()
