"""transformers saves and loads tiny models of random numbers through deepnvme."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: make test-frameworks")

import torch
from safetensors import safe_open

import deepnvme
from deepnvme.integrations import transformers as integration
from deepnvme.integrations._safetensors import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    integration.disable()


def llama(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **settings))


def contents(folder: Path) -> dict[str, tuple[dict[str, str], dict[str, torch.Tensor]]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found[path.name] = (file.metadata(), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard_size", ["100KB", "5GB"], ids=["sharded", "whole"])
def test_save_and_load(tmp_path: Path, shard_size: str, dtype: torch.dtype) -> None:
    model = llama(tie_word_embeddings=True).to(dtype)
    model.save_pretrained(tmp_path / "stock", max_shard_size=shard_size)
    before = deepnvme.stats()
    with integration.enabled():
        model.save_pretrained(tmp_path / "ours", max_shard_size=shard_size)
        written = deepnvme.stats().bytes_written - before.bytes_written
        loaded = type(model).from_pretrained(tmp_path / "ours", dtype="auto")
    files = list((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2 if shard_size == "100KB" else len(files) == 1
    assert written >= sum(path.stat().st_size for path in files)
    assert deepnvme.stats().bytes_read > before.bytes_read
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))

    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in (tmp_path / "stock").iterdir()
    }
    for name in ("model.safetensors.index.json", "config.json"):
        if (tmp_path / "stock" / name).exists():
            ours, stock = ((tmp_path / folder / name).read_text() for folder in ("ours", "stock"))
            assert json.loads(ours) == json.loads(stock)
    stock_files = contents(tmp_path / "stock")
    for name, (metadata, tensors) in contents(tmp_path / "ours").items():
        assert metadata["format"] == stock_files[name][0]["format"] == "pt"
        assert_same(tensors, stock_files[name][1])
    # And the reverse: each reads the other's files.
    assert_same(dict(type(model).from_pretrained(tmp_path / "ours", dtype=dtype).state_dict()), model.state_dict())
    with integration.enabled():
        across = type(model).from_pretrained(tmp_path / "stock", dtype=torch.float64)
        verified = deepnvme.load(tmp_path / "ours", verify="full")
    assert all(torch.equal(tensor.to(dtype), model.state_dict()[name]) for name, tensor in across.state_dict().items())
    assert verified


def test_many_experts_are_put_together(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 101}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    with integration.enabled():
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert_same(dict(type(model).from_pretrained(tmp_path).state_dict()), dict(model.state_dict()))


def test_the_file_as_safetensors_has_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = {"b": torch.randn(7, 5).half(), "a": torch.arange(60).view(4, 3, 5), "none": torch.zeros(0, 2)}
    state |= {"scalar": torch.tensor(3.0), "flag": torch.tensor([True, False])}
    deepnvme.save(state, path, metadata={"more": "text"})
    with TensorFile(path, framework="pt", device="cpu", backend="mmap") as ours, safe_open(path, "pt") as stock:
        assert list(ours.keys()) == list(stock.keys())
        assert ours.metadata() == stock.metadata()
        for name in stock.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), stock.get_tensor(name))
            one, other = ours.get_slice(name), stock.get_slice(name)
            assert (one.get_shape(), one.get_dtype()) == (other.get_shape(), other.get_dtype())
            assert torch.equal(one[...], other[...])
        for index in [slice(1, 3), slice(None), (slice(0, 2), slice(1, 4)), (slice(None), slice(2, 3)), slice(2, 2)]:
            assert torch.equal(ours.get_slice("b")[index], stock.get_slice("b")[index]), index
            assert ours.get_slice("b")[index].is_contiguous()
        assert torch.equal(ours.get_slice("a")[:, 1:, 2:3], stock.get_slice("a")[:, 1:, 2:3])
        with pytest.raises(KeyError, match="nothing"):
            ours.get_tensor("nothing")
    with pytest.raises(ValueError, match="framework"):
        TensorFile(path, framework="np")


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    model = llama()
    with integration.enabled():
        model.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
        path.write_bytes(content)
        with pytest.raises(deepnvme.errors.ChecksumError, match="model"):
            deepnvme.load(path, verify="full")
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(deepnvme.errors.CorruptFileError):
            type(model).from_pretrained(tmp_path)


def test_a_file_that_transformers_itself_loads_is_saved_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration._save_object({"arguments": ZipFile}, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False) == {"arguments": ZipFile}


def test_on_and_off() -> None:
    import transformers.modeling_utils as module

    before = dict(vars(module))
    meta_path = list(sys.meta_path)
    integration.enable()
    integration.enable()
    assert module.safe_save_file is not before["safe_save_file"]
    with integration.enabled():
        pass
    assert module.safe_save_file is not before["safe_save_file"]
    integration.disable()
    integration.disable()
    assert {name: id(value) for name, value in vars(module).items()} == {
        name: id(value) for name, value in before.items()
    }
    assert sys.meta_path == meta_path


TRAINING = """
import sys, torch, transformers
from pathlib import Path
import deepnvme.integrations.transformers as integration
mode, folder, resume = sys.argv[1:]
if mode == "ours":
    integration.enable()
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 211}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1)
torch.manual_seed(3)
model = transformers.LlamaForCausalLM(config)
tokens = torch.randint(0, 211, (32, 12), generator=torch.Generator().manual_seed(1))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
arguments = transformers.TrainingArguments(
    output_dir=folder, max_steps=6, save_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
    disable_tqdm=True, learning_rate=1e-3, seed=5,
)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train(resume_from_checkpoint=resume or None)
torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, Path(folder) / "end.pt")
import deepnvme
print("wrote", deepnvme.stats().bytes_written if mode == "ours" else 0)
"""


def train(mode: str, folder: Path, resume: str = "") -> int:
    command = [sys.executable, "-c", TRAINING, mode, str(folder), resume]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "will refuse this file" not in done.stderr, "transformers itself allows the classes of its files"
    return int(done.stdout.rsplit("wrote", 1)[1])


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: make test-frameworks")
    written = train("ours", tmp_path / "ours")
    train("stock", tmp_path / "stock")
    names = sorted(path.name for path in (tmp_path / "stock" / "checkpoint-4").iterdir())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(names)
    assert sorted(path.name for path in (tmp_path / "ours" / "checkpoint-4").iterdir()) == names
    checkpoints = [path for path in (tmp_path / "ours").glob("checkpoint-*/*") if path.suffix != ".json"]
    assert len(checkpoints) >= 3 * 5
    assert written >= sum(path.stat().st_size for path in checkpoints)
    for name in ("optimizer.pt", "rng_state.pth"):
        with ZipFile(tmp_path / "ours" / "checkpoint-4" / name) as archive:
            assert any(record.endswith("deepnvme/checksums.json") for record in archive.namelist()), name
    ends = [torch.load(tmp_path / run / "end.pt") for run in ("ours", "stock")]
    assert_same(*ends)
    # Resumed by either, from files of either, both end like the uninterrupted run.
    for writer, reader in (("ours", "ours"), ("ours", "stock"), ("stock", "ours")):
        again = tmp_path / f"{writer}-{reader}"
        shutil.copytree(tmp_path / writer / "checkpoint-4", again / "checkpoint-4")
        train(reader, again, str(again / "checkpoint-4"))
        assert_same(torch.load(again / "end.pt"), ends[0])
