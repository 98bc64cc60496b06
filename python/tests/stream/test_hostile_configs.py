"""A model folder of a stranger: its config runs no code, asks nothing of the terminal, and builds no endless model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme.errors import UnsupportedError
from process_memory import memory_bytes, restart_peak

if TYPE_CHECKING:
    from pathlib import Path

    from .small_models import SmallModels

EVIL = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path(__file__).with_name("ran").touch()
class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


@pytest.fixture
def folder(models: SmallModels, tmp_path: Path) -> Path:
    return shutil.copytree(models.folder("llama"), tmp_path / "model")


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("call", ["deepnvme.stream(folder, memory='1MB')", "tokenizer(folder)"])
def test_no_answer_on_the_terminal_lets_code_run(folder: Path, call: str) -> None:
    (folder / "evil.py").write_text(EVIL)
    change(folder, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    code = f"""
import pathlib, sys, transformers, deepnvme
from deepnvme._stream.commands import _tokenizer
folder, tokenizer = pathlib.Path(sys.argv[1]), lambda folder: _tokenizer(transformers, folder)
try:
    {call}
except Exception as error:
    print(type(error).__name__, file=sys.stderr)
print(sys.stdin.readline())
"""
    command = [sys.executable, "-c", code, str(folder)]
    ended = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, check=True, timeout=120)
    assert "Error" in ended.stderr
    assert ended.stdout == "y\n\n", "nothing was asked, and nothing read"
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_the_file_chooses_no_kernel_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    def never(*arguments: object, **_: object) -> None:
        raise AssertionError(f"code of others is loaded: {arguments}")

    monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", never, raising=False)
    change(folder, **{key: "evil/kernels"})
    with pytest.warns(
        UserWarning, match=rf"config\.json: its choice of {key.strip('_')} \('evil/kernels'\) is ignored"
    ) as caught:
        model = deepnvme.stream(folder, memory="4MB")
    assert caught[-1].filename == __file__
    assert model.config._attn_implementation in ("sdpa", "eager")
    model.streaming.close()
    change(folder, **{key: "eager"})
    model = deepnvme.stream(folder, memory="4MB")
    if key.startswith("attn"):
        assert model.config._attn_implementation == "eager"
    model.streaming.close()


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_weights_that_the_files_lack_are_refused_early(folder: Path, key: str) -> None:
    change(folder, **{key: 30_000_000})
    before = restart_peak()
    with pytest.raises(UnsupportedError, match=r"config\.json: it describes a model with far more weights"):
        deepnvme.stream(folder, memory="4MB")
    assert memory_bytes("VmHWM") - before < 300 << 20


@pytest.mark.parametrize(
    ("name", "is_command"),
    [("generation_config.json", False), ("chat_template.jinja", False), ("tokenizer.json", True)],
)
def test_texts_that_claim_gigabytes_are_refused(folder: Path, name: str, *, is_command: bool) -> None:
    with (folder / name).open("ab") as file:
        file.truncate(3 << 30)
    if not is_command:
        with pytest.raises(UnsupportedError, match=name):
            deepnvme.stream(folder, memory="4MB")
        return
    command = [sys.executable, "-m", "deepnvme", "generate", "--model", str(folder), "--memory", "4MB", "--prompt", "a"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1 and f"{name}: it has 3221225472 bytes" in ended.stderr, ended.stderr


def test_other_numbers_may_be_large(folder: Path) -> None:
    change(folder, vocab_size_per_layer_input=262_144, max_position_embeddings=10_000_000, exit_layers=-1)
    deepnvme.stream(folder, memory="4MB").streaming.close()


@pytest.mark.parametrize("layers", [10**9, 50_000, -5])
def test_layers_without_weights_are_refused_early(folder: Path, layers: int) -> None:
    change(folder, num_hidden_layers=layers)
    with pytest.raises(UnsupportedError, match=r"config\.json: .*(layers|weights)"):
        deepnvme.stream(folder, memory="1MB")
    # The count is that of the thread that builds, while it builds.
    thread = threading.Thread(target=lambda: torch.nn.Sequential(*(torch.nn.Identity() for _ in range(20_000))))
    thread.start()
    thread.join()
    assert len(torch.nn.ModuleList(torch.nn.Identity() for _ in range(20_000))) == 20_000
