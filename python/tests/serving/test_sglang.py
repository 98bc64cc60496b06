"""SGLang on the CPU, with its weights through deepnvme, and with streamed layers."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import pytest

from . import models

models.skip_without("sglang")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# `open_sizes` lists the sizes of the files in the folder that running processes have open, also of unnamed ones.
GENERATE = """
    import glob, os
    import sglang

    def open_sizes():
        # A process has a file open once for direct I/O and once without.
        seen = set()
        for link in glob.glob("/proc/[0-9]*/fd/*"):
            try:
                if os.readlink(link).startswith({folder!r}):
                    found = os.stat(link)
                    seen.add((link.split("/")[2], found.st_ino, found.st_size))
            except OSError:
                pass
        return sorted(size for _, _, size in seen)

    if __name__ == "__main__":
        engine = sglang.Engine(
            model_path="model", device="cpu", attention_backend="torch_native", skip_tokenizer_init=True,
            disable_cuda_graph=True, mem_fraction_static=0.1, max_total_tokens=2048, log_level="error", **{settings})
        found = []
        for prompt in ([1, 5, 9, 11], [7, 3]):
            wanted = {{"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
            made = engine.generate(input_ids=prompt, sampling_params=wanted, return_logprob=True)
            found.append([made["output_ids"], [step[0] for step in made["meta_info"]["output_token_logprobs"]]])
        answer([found, open_sizes()])
        engine.shutdown()
"""


@pytest.fixture
def generate(tmp_path: Path, server: Callable[..., Any]) -> Callable[..., Any]:
    """Generate with an engine. Returns the output, and the sizes of the files that its processes stream from."""
    folder = tmp_path / "weights"
    folder.mkdir()

    def run(settings: dict[str, Any], **environment: str) -> Any:
        if environment.pop("offload", ""):
            environment["DEEPNVME_OFFLOAD_DIR"] = str(folder)
        return server(GENERATE.format(settings=settings, folder=str(folder)), **environment)

    return run


def test_the_wheel_names_the_plugins() -> None:
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    ours = {point.name: point.value for point in points if point.name.startswith("deepnvme")}
    assert ours == {
        "deepnvme": "deepnvme.integrations.sglang:register",
        "deepnvme_loader": "deepnvme.integrations.sglang_loader:register",
    }


def test_a_model_generates_the_same_from_disk(tmp_path: Path, generate: Callable[..., Any]) -> None:
    models.write_llama(tmp_path / "model", tie_word_embeddings=False)
    stock, none = generate({"load_format": "safetensors"})
    assert none == []
    assert len({token for tokens, _ in stock for token in tokens}) > 4

    settings = {"load_format": "deepnvme", "model_loader_extra_config": '{"prefetch_bytes": "1MB", "verify": "off"}'}
    loaded, none = generate(settings)
    assert none == []
    assert loaded == stock

    memory = {"DEEPNVME_OFFLOAD_MEMORY": "2.5MB", "DEEPNVME_OFFLOAD_PREFETCH_LAYERS": "1"}
    streamed, files = generate(settings, offload="yes", **memory)
    assert streamed == stock
    # Six layers of 1.2 MB.
    assert files
    assert all(size > 6_000_000 for size in files)
    assert list((tmp_path / "weights").iterdir()) == []


def test_ranks_stream_from_files_of_their_own(tmp_path: Path, generate: Callable[..., Any]) -> None:
    models.write_llama(tmp_path / "model", tie_word_embeddings=True)
    # A CUDA build of torch brings NCCL, which SGLang takes for a sign of GPUs.
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
    stock, _ = generate({"tp_size": 2}, **environment)
    streamed, files = generate({"tp_size": 2, "load_format": "deepnvme"}, offload="yes", **environment)
    assert streamed == stock
    # Each rank has half of it, and opens no file of the other.
    assert len(files) == 2
    assert all(3_000_000 < size < 5_000_000 for size in files)


CHECK = """
    from sglang.srt.plugins import load_plugins
    load_plugins()
"""


def test_nothing_changes_until_it_is_asked_for(server: Callable[..., Any]) -> None:
    told = server(
        CHECK
        + """
    from sglang.srt.utils import offloader
    from sglang.srt.configs.load_config import LoadConfig
    found = [offloader.create_offloader.__module__, hasattr(offloader.create_offloader, "__wrapped__")]
    for name in ("auto", "pt"):
        found.append(str(LoadConfig(load_format=name).load_format.value))
    try:
        LoadConfig(load_format="deepnvm")
    except ValueError as error:
        found.append(str(error))
    answer(found)
    """
    )
    assert told[:4] == ["sglang.srt.utils.offloader", False, "auto", "pt"]
    assert "deepnvm" in told[4]


APPLIED = (
    CHECK
    + """
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import offloader
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader, DefaultModelLoader
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    import torch

    loader = get_model_loader(LoadConfig(load_format="DeepNVMe", model_loader_extra_config='{"prefetch_bytes": 9000}'))
    settings = dict(model_path="model", device="cpu", skip_tokenizer_init=True)
    set_global_server_args_for_scheduler(ServerArgs(load_format="deepnvme", **settings))
    made = {"offloader": type(offloader.create_offloader()).__name__}
    source = DefaultModelLoader.Source("model", None, prefix="x.")
    ours = list(loader._get_weights_iterator(source))
    stock = dict(get_model_loader(LoadConfig(load_format="safetensors"))._get_weights_iterator(source))
    bits = lambda tensor: [tensor.shape, tensor.flatten().contiguous().view(torch.uint8).tolist()]
    made["same"] = all(bits(tensor) == bits(stock[name]) for name, tensor in ours)
    made["patched"] = sorted(HookRegistry._patched)
    made["choices"] = LOAD_FORMAT_CHOICES.count("deepnvme")
    made["default"] = isinstance(loader, DefaultModelLoader)
    made["counts"] = [len(ours), len(stock)]
    set_global_server_args_for_scheduler(ServerArgs(cpu_offload_gb=1, **settings))
    try:
        offloader.create_offloader()
    except ValueError as error:
        made["refused"] = str(error)
    answer(made)
    """
)


def test_the_hooks_are_applied(tmp_path: Path, server: Callable[..., Any]) -> None:
    models.write_llama(tmp_path / "model")
    made = server(APPLIED, DEEPNVME_OFFLOAD_DIR=str(tmp_path))
    assert made["offloader"] == "Offloader"
    assert made["patched"] == [
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
        "sglang.srt.utils.offloader.create_offloader",
    ]
    assert made["choices"] == 1
    assert made["default"]
    assert made["counts"][0] == made["counts"][1] > 20
    assert made["same"]
    assert "use only one of them" in made["refused"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DEEPNVME_OFFLOAD_DIR": "nowhere"}, "DEEPNVME_OFFLOAD_DIR is 'nowhere', which is not a folder"),
        ({"DEEPNVME_OFFLOAD_MEMORY": "much"}, "DEEPNVME_OFFLOAD_MEMORY is 'much'"),
        ({"DEEPNVME_OFFLOAD_PREFETCH_LAYERS": "-1"}, "DEEPNVME_OFFLOAD_PREFETCH_LAYERS is '-1'"),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    pytest.importorskip("sglang.srt.utils.offloader")
    from sglang.srt.utils.offloader import NoopOffloader

    from deepnvme.integrations.sglang import create_offloader

    monkeypatch.setenv("DEEPNVME_OFFLOAD_DIR", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        create_offloader(NoopOffloader)
