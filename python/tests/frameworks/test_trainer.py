"""A Trainer of transformers with everything on disk trains, saves and resumes as in memory."""

from __future__ import annotations

import doctest
import inspect
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: make test-frameworks")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")

import accelerate
import torch
import transformers

import deepnvme
from deepnvme.errors import UnsupportedError
from deepnvme.integrations.transformers import offload

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 6


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()


def made(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 60}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def trainer_of(folder: Path, model: Any, **settings: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 60, (16,), generator=generator) for _ in range(96)]
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    data = [{"input_ids": one, "labels": one} for one in tokens]
    arguments = transformers.TrainingArguments(str(folder), **options)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])


def losses(trainer: Any) -> list[float]:
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}, {}),
        ({"bf16": True, "activation_checkpointing": True}, {}),
        ({}, {"in_backward": True}),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"checksums": True}),
        ({"optim": "adagrad"}, {}),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_losses_and_weights(tmp_path: Path, settings: Any, more: Any, tied: bool) -> None:
    plain = trainer_of(tmp_path / "plain", made(tied=tied), **settings)
    plain.train()
    trainer = trainer_of(tmp_path / "run", made(tied=tied), **settings)
    optimizer = offload(trainer, memory="1MB", swap_dir=tmp_path / "swap", **more)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert len(losses(trainer)) == STEPS
    assert trainer.model.offloading.stats().bytes_read > 0
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for folder in ("checkpoint-4", "checkpoint-6"):
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / folder)
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain" / folder)
        for (name, one), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
    optimizer.close()
    for (name, one), other in zip(trainer.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert "save_pretrained" not in vars(trainer.model)
    assert "_save_optimizer_and_scheduler" not in vars(trainer)


def test_clipped_gradients(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "plain", made(), max_grad_norm=0.1)
    plain.train()
    trainer = trainer_of(tmp_path / "run", made(), max_grad_norm=0.1)
    offload(trainer, memory="1MB", swap_dir=tmp_path / "swap")
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_resume(tmp_path: Path, tied: bool) -> None:
    """From a checkpoint of its own, and from one of a Trainer without it."""
    whole = trainer_of(tmp_path / "plain", made(tied=tied))
    whole.train()
    first = trainer_of(tmp_path / "run", made(tied=tied))
    optimizer = offload(first, memory="1MB", swap_dir=tmp_path / "swap")
    first.train()
    optimizer.close()
    for folder in ("run", "plain"):
        trainer = trainer_of(tmp_path / "again", made(tied=tied))
        optimizer = offload(trainer, memory="1MB", swap_dir=tmp_path / "swap")
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-4"))
        assert losses(trainer)[-2:] == losses(whole)[-2:]
        optimizer.close()
        for one, other in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_the_optimizer_alone(tmp_path: Path) -> None:
    """A Trainer takes it by name, as it does for FSDP."""
    plain = trainer_of(tmp_path / "plain", made(), weight_decay=0.0)
    plain.train()
    trainer = trainer_of(tmp_path / "run", made(), weight_decay=0.0)
    settings = {"lr": 1e-3, "swap_dir": tmp_path / "swap", "memory": "1MB"}
    trainer.optimizer_cls_and_kwargs = (deepnvme.optim.AdamW, settings)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert trainer.optimizer.optimizer.swap_stats().bytes_written > 0


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accelerate_alone(tmp_path: Path, clip: float | None) -> None:
    def run(model: Any, optimizer: Any) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for step in range(8):
            with accelerator.accumulate(model):
                words = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(step))
                loss = model(input_ids=words, labels=words).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    model, optimizer = deepnvme.offload(made(), torch.optim.AdamW, lr=1e-3, memory="1MB", swap_dir=tmp_path)
    plain = made()
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert run(model, optimizer) == (expected if clip is None else pytest.approx(expected, rel=1e-5))
    assert model.offloading.stats().bytes_read > 0


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 3e-1}
    trainer = trainer_of(tmp_path / "run", made(), **settings)
    optimizer = offload(trainer, memory="1MB", swap_dir=tmp_path / "swap")
    trainer.train()
    best = transformers.LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    optimizer.close()
    for one, other in zip(trainer.model.parameters(), best.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"deepnvme": deepnvme, "torch": torch}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(offload) or "", names, "offload", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes a transformers\.Trainer, not Linear"):
        offload(torch.nn.Linear(2, 2), memory="1MB", swap_dir=tmp_path)
    trainer = trainer_of(tmp_path / "run", made(), max_grad_norm=1.0)
    with pytest.raises(UnsupportedError, match="max_grad_norm=0"):
        offload(trainer, memory="1MB", swap_dir=tmp_path, in_backward=True)
    with pytest.raises(UnsupportedError, match="Adafactor keeps no state on disk"):
        offload(trainer_of(tmp_path / "run", made(), optim="adafactor"), memory="1MB", swap_dir=tmp_path)
    with pytest.raises(MemoryError, match="is enough"):
        offload(trainer, memory="60KB", swap_dir=tmp_path)
    optimizer = offload(trainer, memory="1MB", swap_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="has an optimizer already"):
        offload(trainer, memory="1MB", swap_dir=tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    deepnvme.save({"a": torch.ones(3)}, other / "model.safetensors")
    with pytest.raises(UnsupportedError, match="of another model"):
        trainer.train(resume_from_checkpoint=str(other))
    optimizer.close()
