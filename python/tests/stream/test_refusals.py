"""Models that cannot be streamed are refused at once, with a remedy."""

from __future__ import annotations

import copy
import functools
import io
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import deepnvme
from deepnvme.errors import ClosedError, InvalidArgumentError, NotFolderError, NotFoundError, UnsupportedError

from . import plain_module
from .small_models import SmallModels, tokens, type_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_too_little_memory_names_a_sufficient_amount(saved: plain_module.Saved) -> None:
    for memory in (1, 10_000, 65_536):
        with pytest.raises(MemoryError, match=f"memory={memory} is too little for this model") as caught:
            saved.stream(memory=memory)
        needed = int(str(caught.value).split("memory=")[-1].split()[0])
        model = saved.stream(memory=needed)
        with torch.no_grad():
            assert torch.equal(model(saved.question), saved.answer)
        model.streaming.close()
        with pytest.raises(MemoryError):
            saved.stream(memory=needed * 9 // 10)


def test_no_folder_and_no_weights(models: SmallModels, tmp_path: Path) -> None:
    models.folder("llama")
    with pytest.raises(NotFoundError, match="nowhere"):
        deepnvme.stream(tmp_path / "nowhere", memory="1MB")
    (tmp_path / "config.json").write_text((models.folder("llama") / "config.json").read_text())
    with pytest.raises(NotFoundError, match=r"no weights \(model\.safetensors.*stream\(module, weights=file"):
        deepnvme.stream(tmp_path, memory="1MB")
    with pytest.raises(NotFolderError, match=r"this is a file, .*stream\(module, weights=file"):
        deepnvme.stream(tmp_path / "config.json", memory="1MB")
    shutil.copy(models.folder("llama") / "model.safetensors", tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        deepnvme.stream(tmp_path, memory="1MB")
    with pytest.raises(ValueError, match="it must be a size such as"):
        deepnvme.stream(tmp_path, memory="much")


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bf16"}, {"dtype": torch.float32}, {"model_class": nn.Linear}, {"attn_implementation": "eager"}],
)
def test_a_module_is_used_as_it_is(saved: plain_module.Saved, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{next(iter(options))}: only for a model folder"):
        saved.stream(**options)
    saved.stream(dtype="auto").streaming.close()


def test_dtypes_have_short_names(models: SmallModels) -> None:
    for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("float32", torch.float32)):
        model = deepnvme.stream(models.folder("llama"), memory="1MB", dtype=word)
        assert model.dtype == dtype
        model.streaming.close()
    with pytest.raises(InvalidArgumentError, match="dtype is 'bf17'; it must be one of 'auto', 'bf16', 'fp16', 'fp32'"):
        deepnvme.stream(models.folder("llama"), memory="1MB", dtype="bf17")


def test_weights_of_another_kind_are_named_with_their_file(models: SmallModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "llama")
    state = load_file(folder / "model.safetensors")
    name = next(iter(state))
    state[name] = state[name].to(torch.int16)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: .* is torch.int16 on disk .*check that the file"):
        deepnvme.stream(folder, memory="1MB")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "llama", "hidden_size": "many"}'])
def test_a_damaged_configuration(models: SmallModels, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "damaged")
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedError, match=r"config\.json: transformers refuses it"):
        deepnvme.stream(folder, memory="1MB")


def test_weights_that_are_missing_are_never_made_up(models: SmallModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "incomplete")
    weights = load_file(folder / "model.safetensors")
    missing = [name for name in weights if "mlp.up_proj" in name]
    save_file(
        {name: tensor for name, tensor in weights.items() if name not in missing},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(UnsupportedError, match=f"the files lack weights.*{missing[0]}"):
        deepnvme.stream(folder, memory="1MB")


def test_weights_of_another_shape(models: SmallModels, tmp_path: Path) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "mlp.up_proj" in name)
    weights[name] = weights[name].t().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape = tuple(weights[name].shape)
    expected = f"{name} has shape {shape} in the files, and {shape[::-1]} in Llama"
    with pytest.raises(UnsupportedError, match=re.escape(expected)):
        deepnvme.stream(folder, memory="1MB")


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_is_not_loaded_over_streamed_weights(saved: plain_module.Saved, *, assign: bool) -> None:
    model = saved.stream()
    state = {name: torch.rand(tensor.shape) for name, tensor in plain_module.Plain().state_dict().items()}
    with pytest.raises(RuntimeError, match=r"is streamed from its file.*close\(\) first"):
        model.load_state_dict(state, assign=assign)
    with torch.no_grad():
        assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()
    model.load_state_dict(state, assign=True)
    assert torch.equal(model.layers[0].weight, state["layers.0.weight"])


def test_models_managed_by_other_libraries(models: SmallModels, tmp_path: Path, saved: plain_module.Saved) -> None:
    shutil.copytree(models.folder("llama"), tmp_path / "quantised")
    config = tmp_path / "quantised" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(UnsupportedError, match="quantised by another library"):
        deepnvme.stream(tmp_path / "quantised", memory="1MB")
    placed = plain_module.Plain()
    placed.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="without device_map"):
        deepnvme.stream(placed, weights=saved.path, memory="1MB")
    options: dict[str, Any] = {
        "device_map": "auto",
        "quantization_config": object(),
        "output_loading_info": True,
        "state_dict": {"a": 1},
    }
    for option, value in options.items():
        with pytest.raises(UnsupportedError, match=f"{option} .*; leave it out"):
            deepnvme.stream(models.folder("llama"), memory="1MB", **{option: value})
    streamed = saved.stream()
    with pytest.raises(UnsupportedError, match="streamed already"):
        deepnvme.stream(streamed, weights=saved.path, memory="1MB")
    streamed.streaming.close()
    assert deepnvme.stream(streamed, weights=saved.path, memory=plain_module.MEMORY) is streamed
    streamed.streaming.close()


def test_options_that_change_nothing(models: SmallModels, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(models.folder("llama"), folder)
    (folder / "config.json").rename(tmp_path / "config.json")
    defaults: dict[str, Any] = {
        "device_map": None,
        "state_dict": None,
        "ignore_mismatched_sizes": False,
        "output_loading_info": False,
    }
    model = deepnvme.stream(folder, memory="8MB", config=str(tmp_path), **defaults)
    assert type(model).__name__ == "LlamaForCausalLM"
    model.streaming.close()


@pytest.mark.parametrize(
    "names", [None, [], "LlamaForCausalLM", 5, {"a": 1}, [5], ["FooForCausalLM"], ["LlamaConfig"], ["pipeline"]]
)
def test_a_configuration_without_a_model_class(models: SmallModels, tmp_path: Path, names: Any) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config if names is None else {**config, "architectures": names}))
    with pytest.raises(UnsupportedError, match=r"config\.json: architectures must name.*; add a line such as"):
        deepnvme.stream(folder, memory="50MB")
    model = deepnvme.stream(folder, memory="50MB", model_class=type_of("llama"))
    model.streaming.close()


@pytest.mark.parametrize(
    "change", [{"hidden_act": "foo"}, {"dtype": 5}, {"hidden_size": -64}, {"architectures": ["BertModel"]}]
)
def test_a_configuration_that_transformers_does_not_check(
    models: SmallModels, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=r"transformers cannot build .*; take config\.json from the original"):
        deepnvme.stream(folder, memory="50MB")


@pytest.mark.parametrize("text", ["[1]", "5", "{", '{"temperature": "hot", "max_new_tokens": "x"}'])
def test_a_damaged_generation_configuration_is_ignored_with_a_warning(
    models: SmallModels, tmp_path: Path, text: str
) -> None:
    folder = shutil.copytree(models.folder("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.warns(UserWarning, match=r"generation_config\.json is ignored") as caught:
        deepnvme.stream(folder, memory="50MB").streaming.close()
    assert caught[-1].filename == __file__


@pytest.mark.parametrize("chosen", [dict, "LlamaForCausalLM"])
def test_a_model_class_that_is_none(models: SmallModels, chosen: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"model_class is .*; pass the class of the saved model"):
        deepnvme.stream(models.folder("llama"), memory="50MB", model_class=chosen)


def test_devices(saved: plain_module.Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="not to mps"):
        saved.stream(device="mps")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedError, match="AMD"):
        saved.stream(device="cuda")


def test_modules_and_files_that_do_not_belong_together(saved: plain_module.Saved) -> None:
    with pytest.raises(UnsupportedError, match=r"deepnvme\.save"):
        deepnvme.stream(plain_module.Plain(), memory="1MB")
    with pytest.raises(UnsupportedError, match="which the module lacks"):
        deepnvme.stream(nn.Linear(3, 3), weights=saved.path, memory="1MB")
    with pytest.raises(UnsupportedError, match=r"bfloat16"):
        deepnvme.stream(plain_module.Plain().bfloat16(), weights=saved.path, memory="1MB")


@pytest.mark.usefixtures("no_grad")
def test_an_existing_module_gets_its_own_weights_back(saved: plain_module.Saved) -> None:
    torch.manual_seed(0)
    module: Any = plain_module.Plain().eval()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in module.state_dict(keep_vars=True).items()}
    keys = {name: set(vars(each)) for name, each in module.named_modules()}
    model: Any = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    assert model is module
    assert torch.equal(model(saved.question), saved.answer)
    assert module.embed.weight is not before["embed.weight"][0]
    model.streaming.close()
    model.streaming.close()
    after = module.state_dict(keep_vars=True)
    assert {name: (tensor, tensor.data_ptr()) for name, tensor in after.items()} == before
    for name, each in module.named_modules():
        assert set(vars(each)) - {"streaming"} == keys[name], "nothing is left on a module"
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
    assert torch.equal(module(saved.question), saved.answer)


@pytest.mark.usefixtures("no_grad")
def test_weights_used_past_their_module(saved: plain_module.Saved) -> None:
    model = saved.stream()
    model(saved.question)
    layer = model.layers[3]
    for use in (
        lambda: nn.functional.linear(torch.zeros(1, plain_module.WIDTH), layer.weight),
        lambda: layer.weight + 1,
        model.half,
        lambda: copy.deepcopy(model),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        # Some of its rows may be in memory; missing rows would read as zeros.
        lambda: model.embed.weight[3] + 0,
        lambda: nn.functional.linear(torch.zeros(1, plain_module.WIDTH), model.embed.weight),
    ):
        with pytest.raises((RuntimeError, TypeError, NotImplementedError, deepnvme.Error), match="on disk"):
            use()
    with pytest.raises(RuntimeError, match="is on disk"):
        deepnvme.save(model.state_dict(), saved.path.with_name("copy.safetensors"))
    assert not saved.path.with_name("copy.safetensors").exists()
    # Reading attributes works.
    assert layer.weight.shape == (plain_module.WIDTH, plain_module.WIDTH)
    assert layer.weight.dtype == torch.float32
    assert sum(each.numel() for each in model.parameters()) > plain_module.DEPTH * plain_module.WIDTH**2
    assert model.to("cpu") is model
    assert model.eval() is model
    assert list(model.state_dict()) == list(plain_module.Plain().state_dict())
    assert "layers.3.weight" in repr(layer.weight)
    assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()


def test_a_model_that_was_closed_is_not_saved_as_nonsense(models: SmallModels, tmp_path: Path) -> None:
    model = deepnvme.stream(models.folder("llama"), memory=300_000)
    model.streaming.close()
    with pytest.raises(ClosedError, match="on disk"):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ClosedError, match="on disk"):
        model(tokens(1, 3))
    # The model can then be loaded another way.
    model.load_state_dict(type_of("llama").from_pretrained(models.folder("llama")).state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 5)).logits, models.model("llama")(tokens(2, 5)).logits)


def test_a_class_of_ones_own(models: SmallModels, streamed: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = streamed(models.folder("llama"), memory=300_000, model_class=transformers.LlamaModel)
    assert type(model) is transformers.LlamaModel
    with torch.no_grad():
        expected = type_of("llama").from_pretrained(models.folder("llama")).model(tokens(2, 5)).last_hidden_state
        assert torch.equal(model(tokens(2, 5)).last_hidden_state, expected)


@pytest.mark.usefixtures("no_grad")
def test_parameters_that_the_file_lacks_are_named(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    expected = module(torch.ones(2, 64))
    state = module.state_dict()
    del state["1.bias"]
    deepnvme.save(state, tmp_path / "weights.safetensors")
    with pytest.warns(
        UserWarning, match=r"weights\.safetensors lacks 1\.bias; the model keeps the module's own values"
    ) as caught:
        streamed = deepnvme.stream(module, weights=tmp_path / "weights.safetensors", memory="1MB")
    assert caught[-1].filename == __file__
    assert torch.equal(streamed(torch.ones(2, 64)), expected)
    streamed.streaming.close()


def test_a_wrapper_around_a_forward_outlives_streaming(tmp_path: Path) -> None:
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    question = torch.ones(1, 64)
    expected = model(question).detach()
    deepnvme.save(model.state_dict(), tmp_path / "weights.safetensors")
    deepnvme.stream(model, weights=tmp_path / "weights.safetensors", memory=60_000)
    # As libraries do that wrap a module's `forward` after it was streamed.
    wrapped = [module for module in model.modules() if "forward" in vars(module)]
    assert wrapped
    for module in wrapped:
        module.forward = functools.partial(module.forward)
    with torch.no_grad():
        assert torch.equal(model(question), expected)
    model.streaming.close()
    assert torch.equal(model(question), expected)
