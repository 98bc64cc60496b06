"""Real Trainers of both packages save and resume through the plugin."""

from __future__ import annotations

import doctest
import importlib
import inspect
import logging
import pathlib
import pickle
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning", reason="lightning is not installed: make test-frameworks")

import torch

import deepnvme
from deepnvme.errors import UnsupportedError
from deepnvme.integrations.lightning import DeepnvmeCheckpointIO

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest) -> Any:
    logging.getLogger(request.param).setLevel(logging.ERROR)
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed: make test-frameworks")


def module_of(pl: Any, **hparams: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 8, **hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 3)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch).pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self.layer(batch).pow(2).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)]

    torch.manual_seed(1)
    return Module(**hparams)


def data() -> Any:
    generator = torch.Generator().manual_seed(7)
    dataset: Any = torch.randn(16, 8, generator=generator)
    return torch.utils.data.DataLoader(dataset, batch_size=4)


def trainer_of(pl: Any, folder: Path, plugins: Any, epochs: int) -> Any:
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")
    keep = callbacks.ModelCheckpoint(dirpath=folder, monitor="val", save_last=True, save_top_k=2)
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep, callbacks.EarlyStopping("val", patience=99), callbacks.Timer()],
        plugins=plugins,
    )


def fit(pl: Any, folder: Path, plugins: Any, epochs: int, hparams: Any = None, **resume: Any) -> Any:
    module = module_of(pl, **(hparams or {}))
    trainer = trainer_of(pl, folder, plugins, epochs)
    trainer.fit(module, data(), data(), **resume)
    return module, trainer


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same(value, right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "background"])
def test_fit_and_resume(pl: Any, tmp_path: Path, is_async: bool) -> None:
    before = deepnvme.stats().bytes_written
    _, trainer = fit(pl, tmp_path / "ours", [DeepnvmeCheckpointIO(async_=is_async)], 3)
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert len(files) == 3
    written = sum(path.stat().st_size for path in (tmp_path / "ours").iterdir())
    assert deepnvme.stats().bytes_written - before >= written

    fit(pl, tmp_path / "stock", None, 3)
    assert files == sorted(path.name for path in (tmp_path / "stock").iterdir())
    for name in files:
        ours = torch.load(tmp_path / "ours" / name, weights_only=True)
        stock = torch.load(tmp_path / "stock" / name, weights_only=True)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "loops", "epoch"):
            assert_same(ours[key], stock[key])
        assert_same(trainer.strategy.load_checkpoint(tmp_path / "ours" / name), ours)

    last = tmp_path / "ours" / "last.ckpt"
    through_ours, _ = fit(pl, tmp_path / "one", [DeepnvmeCheckpointIO(async_=is_async)], 5, ckpt_path=last)
    through_stock, _ = fit(pl, tmp_path / "two", None, 5, ckpt_path=last)
    in_one_go, _ = fit(pl, tmp_path / "three", None, 5)
    assert_same(through_ours.state_dict(), through_stock.state_dict())
    assert_same(through_ours.state_dict(), in_one_go.state_dict())
    loaded = type(through_ours).load_from_checkpoint(last)
    assert loaded.hparams.keys() == through_ours.hparams.keys()


def test_hyper_parameters_of_other_classes(pl: Any, tmp_path: Path) -> None:
    io = DeepnvmeCheckpointIO()
    hparams = {"data": pathlib.PurePosixPath("corpus")}
    fit(pl, tmp_path, [io], 1, hparams)
    last = tmp_path / "last.ckpt"
    with pytest.raises(deepnvme.errors.UnsafeFileError):
        fit(pl, tmp_path / "again", [io], 2, hparams, ckpt_path=last)
    fit(pl, tmp_path / "again", [io], 2, hparams, ckpt_path=last, weights_only=False)
    with pytest.raises(deepnvme.errors.UnsafeFileError, match=r"add_safe_globals\(\[pathlib.PurePosixPath\]\)"):
        io.load_checkpoint(last)
    with torch.serialization.safe_globals([pathlib.PurePosixPath]):
        allowed = io.load_checkpoint(last)
    trusted = io.load_checkpoint(last, weights_only=False)
    assert_same(allowed, trusted)
    assert trusted["hyper_parameters"]["data"] == pathlib.PurePosixPath("corpus")


def test_fabric(pl: Any, tmp_path: Path) -> None:
    fabric_module = importlib.import_module("lightning.fabric" if pl.__name__ == PACKAGES[0] else "lightning_fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, plugins=[DeepnvmeCheckpointIO()])
    model = fabric.setup(torch.nn.Linear(3, 4))
    fabric.save(tmp_path / "state.ckpt", {"model": model, "step": 3})
    other = {"model": fabric.setup(torch.nn.Linear(3, 4)), "step": 0}
    fabric.load(tmp_path / "state.ckpt", other)
    assert other["step"] == 3
    assert_same(dict(other["model"].state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), None, {"cpu": "cpu"}, {"cuda:0": "cpu"}, lambda storage, _: storage],
    ids=["name", "device", "none", "dict", "other", "function"],
)
def test_map_location(tmp_path: Path, location: Any) -> None:
    state = {"weight": torch.randn(5, 7), "nested": [torch.arange(3), {"step": 4}]}
    io = DeepnvmeCheckpointIO()
    io.save_checkpoint(state, tmp_path / "deep" / "er" / "state.ckpt")
    path = tmp_path / "deep" / "er" / "state.ckpt"
    assert_same(io.load_checkpoint(path, location), state)
    # Files from before archives are one pickle, which only somebody who trusts them may run.
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="old format"):
        io.load_checkpoint(path, location)
    assert_same(io.load_checkpoint(path, location, weights_only=False), state)


def test_meta(tmp_path: Path) -> None:
    io = DeepnvmeCheckpointIO()
    io.save_checkpoint({"weight": torch.randn(5, 7)}, tmp_path / "state.ckpt")
    assert io.load_checkpoint(tmp_path / "state.ckpt", torch.device("meta"))["weight"].is_meta


def test_refusals(tmp_path: Path) -> None:
    io = DeepnvmeCheckpointIO()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "state.ckpt", storage_options={"key": 1})
    with pytest.raises(ValueError, match="remote folders"):
        io.save_checkpoint({}, "s3://bucket/state.ckpt")
    with pytest.raises(FileNotFoundError, match="not found"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    io.remove_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "folder").mkdir()
    io.remove_checkpoint(f"file://{tmp_path}/folder")
    assert not (tmp_path / "folder").exists()
    assert isinstance(pickle.loads(pickle.dumps(DeepnvmeCheckpointIO(async_=True))), DeepnvmeCheckpointIO)


def test_a_state_that_is_saved_in_the_background_may_change(tmp_path: Path) -> None:
    io = DeepnvmeCheckpointIO(async_=True, memory=4 << 20)
    expected = torch.randn(4 << 20)
    for round_ in range(3):
        tensor = expected.clone()
        io.save_checkpoint({"tensor": tensor, "round": round_}, tmp_path / f"{round_}.ckpt")
        tensor.zero_()
        if round_:
            io.remove_checkpoint(tmp_path / f"{round_ - 1}.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "2.ckpt")["tensor"], expected)
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["2.ckpt"]
    io.save_checkpoint({"again": 1}, tmp_path / "3.ckpt")
    io.teardown()
    io.teardown()
    assert (tmp_path / "3.ckpt").exists()


def test_the_old_one_stays_until_the_new_one_is_there(tmp_path: Path, slow_engine: deepnvme.Engine) -> None:
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    io = DeepnvmeCheckpointIO(slow_engine, async_=True)
    io.save_checkpoint({"step": 1}, old)
    io.save_checkpoint({"tensor": torch.zeros(8 << 20)}, new)
    io.remove_checkpoint(old)
    assert old.exists()
    assert not new.exists()
    io.teardown()
    assert not old.exists()
    assert new.exists()


def test_failures_in_the_background(tmp_path: Path) -> None:
    io = DeepnvmeCheckpointIO(async_=True)
    (tmp_path / "taken").mkdir()
    io.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    io.save_checkpoint({"step": 2, "tensor": torch.zeros(1 << 20)}, tmp_path / "taken")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(OSError, match="taken"):
        io.save_checkpoint({"step": 3}, tmp_path / "3.ckpt")
    io.save_checkpoint({"step": 3}, tmp_path / "3.ckpt")
    io.teardown()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"3.ckpt", "1.ckpt"}

    io.save_checkpoint({"step": 2, "tensor": torch.zeros(1 << 20)}, tmp_path / "taken")
    with pytest.raises(OSError, match="taken"):
        io.teardown()
    io.teardown()


def test_the_example_in_its_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.cleandoc(DeepnvmeCheckpointIO.__doc__ or "")
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch}, "DeepnvmeCheckpointIO", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_everything_on_disk(pl: Any, tmp_path: pathlib.Path, settings: dict[str, Any]) -> None:
    """The losses are those of training in memory, also after a checkpoint."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, *, is_offloaded: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
            self.losses: list[float] = []
            self.is_offloaded = is_offloaded

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            if not self.is_offloaded:
                return torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            where: dict[str, Any] = {"memory": "128KB", "swap_dir": tmp_path / "swap"}
            return deepnvme.offload(self.model, torch.optim.AdamW, lr=1e-2, **where)[1]

    rows: Any = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    batches: Any = torch.utils.data.DataLoader(rows, batch_size=4)

    def run(epochs: int, folder: str, *, is_offloaded: bool, begin: Any = None) -> list[float]:
        module = Module(is_offloaded=is_offloaded)
        saves = pl.callbacks.ModelCheckpoint(tmp_path / folder, save_last=True)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[saves], **quiet, **settings).fit(
            module, batches, ckpt_path=begin
        )
        return module.losses

    whole = run(2, "plain", is_offloaded=False)
    first = run(1, "first", is_offloaded=True)
    second = run(2, "second", is_offloaded=True, begin=tmp_path / "first" / "last.ckpt")
    expected = whole if "gradient_clip_val" not in settings else pytest.approx(whole, rel=1e-5)
    assert first + second == expected
