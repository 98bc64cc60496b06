"""vLLM on the CPU, with its weights through deepnvme."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import pytest

from . import models

models.skip_without("vllm")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# In float32: vLLM's kernels for bf16 crashed with an illegal instruction on virtual machines with AMX.
GENERATE = (
    models.LOG_PROBABILITIES
    + """
    from vllm import LLM, SamplingParams
    if __name__ == "__main__":
        fixed = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32")
        model = LLM(model="model", **fixed, **{settings})
        prompts = [{{"prompt_token_ids": [1, 5, 9, 11]}}, {{"prompt_token_ids": [7, 3]}}]
        wanted = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=3)
        found = log_probabilities(model.generate(prompts, wanted))
        answer(found)
"""
)


def test_the_wheel_names_the_plugin() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="deepnvme")
    assert [point.value for point in points] == ["deepnvme.integrations.vllm:register"]


def test_a_model_generates_the_same(tmp_path: Path, server: Callable[..., Any]) -> None:
    models.write_llama(tmp_path / "model", tie_word_embeddings=False)
    stock = server(GENERATE.format(settings="{'load_format': 'safetensors'}"))
    settings = {"load_format": "deepnvme", "model_loader_extra_config": {"prefetch_bytes": "1MB", "verify": "off"}}
    ours = server(GENERATE.format(settings=settings))
    assert len({token for tokens, _ in stock for token in tokens}) > 4
    assert ours == stock


ITERATE = """
    import torch, deepnvme
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    Source = DefaultModelLoader.Source

    def weights(config, **source):
        loader = get_model_loader(config)
        loader.local_expert_ids = {experts}
        return dict(loader._get_weights_iterator(Source("model", None, prefix="x.", **source)))

    stock = weights(LoadConfig(load_format="safetensors"))
    before = deepnvme.stats().bytes_read
    config = LoadConfig(load_format="deepnvme", model_loader_extra_config={{"prefetch_bytes": 50_000}})
    ours = weights(config)
    read = deepnvme.stats().bytes_read - before
    bits = lambda tensor: [tensor.shape, tensor.flatten().contiguous().view(torch.uint8).tolist()]
    same = all(bits(ours[name]) == bits(tensor) for name, tensor in stock.items())
    kept = dict(config.model_loader_extra_config)
    answer([sorted(stock), sorted(ours), same, read, type(get_model_loader(config)).__name__, kept])
"""


@pytest.mark.parametrize("experts", [None, {1, 2}])
def test_the_loader_yields_the_same_as_vllms(
    tmp_path: Path, server: Callable[..., Any], experts: set[int] | None
) -> None:
    models.write_mixtral(tmp_path / "model")
    stock, ours, same, read, name, kept = server(ITERATE.format(experts=experts))
    assert ours == stock
    assert same
    assert read > 0
    assert name == "DeepnvmeModelLoader"
    assert kept == {"prefetch_bytes": 50_000}
    numbers = {name.split(".experts.")[1].split(".")[0] for name in ours if ".experts." in name}
    assert numbers == ({"0", "1", "2", "3"} if experts is None else {"1", "2"})


def test_a_truncated_shard_is_reported(tmp_path: Path, server: Callable[..., Any]) -> None:
    models.write_mixtral(tmp_path / "model")
    victim = sorted((tmp_path / "model").glob("*.safetensors"))[2]
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 77)
    program = ITERATE.format(experts=None).replace("stock = weights", "stock = lambda: weights")
    said = server(
        program.replace("ours = weights(config)", "ours = said(lambda: weights(config))").replace(
            "def weights",
            "def said(call):\n        try:\n            call()\n        except Exception as error:\n"
            "            answer([type(error).__name__, str(error)])\n            sys.exit()\n\n    def weights",
        )
    )
    assert said[0] == "CorruptFileError"
    assert victim.name in said[1]


def test_other_load_formats_are_as_they_were(server: Callable[..., Any]) -> None:
    told = server("""
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader
        from deepnvme.integrations.vllm import register
        register()
        try:
            get_model_loader(LoadConfig(load_format="deepnvme", model_loader_extra_config={"far": 1}))
        except ValueError as error:
            refused = str(error)
        loaders = [get_model_loader(LoadConfig(load_format=name)) for name in ("auto", "dummy")]
        answer([type(loader).__name__ for loader in loaders] + [refused])
    """)
    assert told[:2] == ["DefaultModelLoader", "DummyModelLoader"]
    assert "far" in told[2]
