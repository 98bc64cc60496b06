"""Tests of ``deepnvme generate`` and ``deepnvme stream-bench``."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import deepnvme  # noqa: E402
from deepnvme import __main__  # noqa: E402
from deepnvme._stream import throughput  # noqa: E402
from deepnvme._stream.benchmark import default_memory, measure  # noqa: E402
from deepnvme._stream.commands import TokenProgress  # noqa: E402
from small_llama import small_llama  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = [f"word{number}" for number in range(200)]
PROMPTS = ["word1 word2 word3", "word7", "word9 word8 word7 word6 word5", "word4 word4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer whose words are whole tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(3)
    model = small_llama(vocab_size=len(vocabulary), num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(path)
    return path


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the command in this process, since importing torch again takes most of the time."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["deepnvme", *arguments])
        status = __main__.main()
        told = capfd.readouterr()
        return Done(status, told.out, told.err)

    return run


def in_memory(folder: Path, prompt: str, count: int, dtype: str = "auto") -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=2)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "[1]"), ("tokenizer.json", "{"), ("tokenizer_config.json", '["a"]')]
)
def test_a_damaged_tokenizer(command: Callable[..., Done], folder: Path, tmp_path: Path, name: str, text: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / name).write_text(text)
    done = command("generate", "--model", str(copy), "--memory", "50MB", "--prompt", "word1")
    assert done.returncode == 1
    assert f"{copy}: transformers cannot read the tokenizer" in done.stderr
    assert done.stderr.endswith("; copy the model's tokenizer.json and tokenizer_config.json into it\n")


def test_generate_gives_the_text_of_the_model_in_memory(
    folder: Path, tmp_path: Path, command: Callable[..., Done]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    trace = tmp_path / "timeline.json"
    done = command(
        *("generate", "--model", str(folder), "--prompt-file", str(prompts), "--memory", "1MB", "--batch", "3"),
        *("--max-new-tokens", "7", "--json", "--trace", str(trace)),
    )
    assert done.returncode == 0, done.stderr
    *answers, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(answer["index"] for answer in answers) == [0, 1, 2, 3]
    for answer in answers:
        assert answer["prompt"] == PROMPTS[answer["index"]]
        assert answer["text"] == in_memory(folder, answer["prompt"], 7)
    stats = last["stats"]
    assert stats["new_tokens"] == 4 * 7
    assert stats["bytes_read"] > 0
    assert 0 < stats["roofline_fraction"] <= 1
    assert "of the roofline" in done.stderr
    lanes = {event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert "compute" in lanes


def test_generate_prints_text(folder: Path) -> None:
    arguments = ["generate", "--model", str(folder), "--prompt", PROMPTS[0], "--memory", "1MB", "--max-new-tokens", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "deepnvme", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == in_memory(folder, PROMPTS[0], 5) + "\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_generate_computes_in_another_dtype(folder: Path, command: Callable[..., Done], dtype: str) -> None:
    arguments = ["--model", str(folder), "--prompt", PROMPTS[1], "--memory", "1MB", "--max-new-tokens", "6"]
    done = command("generate", *arguments, "--dtype", dtype)
    assert done.returncode == 0, done.stderr
    assert done.stdout == in_memory(folder, PROMPTS[1], 6, "bfloat16") + "\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--memory", "1MB"], 2, "--prompt-file <PROMPT_FILE>"),
        (["--prompt", "word1", "--memory", "1MB", "--temperature", "nan"], 2, "--temperature"),
        (["--prompt", "word1", "--memory", "1MB", "--temperature", "inf"], 2, "--temperature"),
        (["--prompt", "word1", "--memory", "1MB", "--temperature", "-1"], 2, "--temperature"),
        (["--prompt", "", "--memory", "1MB"], 2, "prompt 1 of 1 is '', which has no tokens"),
        (["--prompt", "word1", "--prompt", "", "--memory", "1MB"], 2, "prompt 2 of 2 is ''"),
        (["--prompt", "word1", "--memory", "lots"], 2, "4GB"),
        (["--prompt", "word1", "--memory", "1000"], 1, "is enough"),
        (["--prompt-file", "/nonexistent/prompts", "--memory", "1MB"], 1, "/nonexistent/prompts"),
        (["--prompt", "word1", "--memory", "1MB", "--model", "/nonexistent"], 2, "config.json"),
        (["--prompt", "word1", "--memory", "1MB", "--device", "tpu"], 2, "tpu"),
        (["--prompt", "word1", "--memory", "1MB", "--dtype", "float64"], 2, "fp32"),
    ],
)
def test_usage_errors_are_reported(
    folder: Path, arguments: list[str], status: int, said: str, command: Callable[..., Done]
) -> None:
    done = command("generate", "--model", str(folder), *arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_of_prompts_in_another_encoding_is_named(
    folder: Path, tmp_path: Path, command: Callable[..., Done]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"w\xf6rd\n")
    done = command("generate", "--model", str(folder), "--prompt-file", str(tmp_path / "latin.txt"), "--memory", "1MB")
    assert done.returncode == 2
    assert f"--prompt-file {tmp_path / 'latin.txt'}: it is not UTF-8" in done.stderr
    assert "iconv" in done.stderr


def test_one_text_for_prompts_is_refused(folder: Path) -> None:
    model = deepnvme.stream(folder, memory="1MB")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(TypeError, match="prompts is one str, 'word1'; it must be a list of str"):
        next(model.streaming.generate(tokenizer, "word1"))
    with pytest.raises(deepnvme.errors.InvalidArgumentError, match="prompt 1 of 1 is ''"):
        next(model.streaming.generate(tokenizer, [""]))
    model.streaming.close()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model-size=100MB", "--model-size is 100MB; it must be at least 438MB"),
        ("--prompt-tokens=0", "--prompt-tokens is 0; it must be a whole number of at least 1"),
        ("--new-tokens=0", "--new-tokens is 0"),
        ("--batch=0", "--batch is 0"),
    ],
)
def test_stream_bench_refuses_small_numbers_at_once(
    tmp_path: Path, command: Callable[..., Done], option: str, said: str
) -> None:
    done = command("stream-bench", str(tmp_path), option)
    assert done.returncode == 2
    assert said in done.stderr


def test_stream_bench_measures_and_leaves_nothing(tmp_path: Path, command: Callable[..., Done]) -> None:
    done = command(
        *("stream-bench", str(tmp_path), "--model-size", "450MB", "--prompt-tokens", "4"),
        *("--new-tokens", "3", "--batch", "1", "--batch", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["batch"] for row in answer["rows"]] == [1, 2]
    for row in answer["rows"]:
        assert row["roofline_s"] == max(row["disk_s"], row["compute_s"]) > 0
        assert row["roofline_fraction"] == row["roofline_s"] / row["step_s"]
        assert row["new_tokens_per_s"] > 0
    assert answer["best_batch"] in {1, 2}
    assert not list(tmp_path.iterdir())


def test_stream_bench_measures_the_packed_model(tmp_path: Path, command: Callable[..., Done]) -> None:
    done = command(
        *("stream-bench", str(tmp_path), "--model-size", "450MB", "--memory", "600MB", "--prompt-tokens", "4"),
        *("--new-tokens", "2", "--batch", "1", "--pack", "int8", "--dtype", "float32", "--json"),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["dtype"] == "float32"
    # Matrices take one byte per weight instead of two, plus scales; embeddings and norms are unchanged.
    assert 0.5 < answer["file_bytes"] / answer["model_bytes"] < 0.75
    assert answer["rows"][0]["step_bytes"] < 0.75 * answer["model_bytes"]
    assert not list(tmp_path.iterdir())


def test_stream_bench_needs_room(tmp_path: Path, command: Callable[..., Done]) -> None:
    done = command("stream-bench", str(tmp_path), "--model-size", "900TB")
    assert done.returncode == 2
    assert "free" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "written", "expected"),
    [
        ("auto", torch.bfloat16, 250),
        ("auto", torch.float32, 500),
        ("bfloat16", torch.float32, 250),
        ("float16", torch.float32, 250),
        ("float32", torch.bfloat16, 500),
    ],
)
def test_stream_bench_uses_memory_for_a_quarter_of_the_model(dtype: str, written: Any, expected: int) -> None:
    assert default_memory(4_000_000, dtype, transformers.LlamaConfig(dtype=written, vocab_size=1)) == expected * 4000


@pytest.mark.parametrize("is_file", [True, False])
def test_stream_bench_needs_a_folder(tmp_path: Path, command: Callable[..., Done], is_file: bool) -> None:
    path = tmp_path / "elsewhere"
    if is_file:
        path.write_text("mine", encoding="ascii")
    done = command("stream-bench", str(path), "--model-size", "450MB")
    assert done.returncode == 2
    assert f"{path} is not a folder" in done.stderr
    assert path.exists() == is_file


def test_many_prompts_go_in_batches(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = deepnvme.stream(folder, memory="1MB")
    assert model.streaming.best_batch(5, 6, memory="1MB") < model.streaming.best_batch(5, 6, memory="2MB")
    for batch in (1, 3, None):
        answers = dict(model.streaming.generate(tokenizer, PROMPTS, batch=batch, max_new_tokens=6, do_sample=False))
        assert answers == {index: in_memory(folder, prompt, 6) for index, prompt in enumerate(PROMPTS)}
    assert list(model.streaming.generate(tokenizer, [])) == []
    model.streaming.close()
    with pytest.raises(deepnvme.errors.ClosedError):
        next(model.streaming.generate(tokenizer, PROMPTS))


def test_the_batch_grows_with_memory_and_shrinks_with_length() -> None:
    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024
    )
    model: Any = type("Model", (), {"config": config, "dtype": torch.bfloat16, "device": torch.device("cpu")})()
    batches = [throughput.best_batch(model, 100, 100, memory) for memory in (1 << 20, 1 << 26, 1 << 28)]
    assert batches[0] == 1
    assert batches[0] < batches[1] < batches[2]
    assert throughput.best_batch(model, 1000, 100, 1 << 28) < batches[2]
    each = throughput.sequence_memory(config, torch.bfloat16, 100, 100)
    assert each.cache_bytes == 2 * 4 * 512 * 200 * 2
    assert throughput.best_batch(model, 8, 8) >= 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    progress = TokenProgress(1200)
    progress.add(700)
    progress.add(400)
    if not is_terminal:
        progress.clear()
        assert shown.getvalue() == ""
        return
    *_, last = shown.getvalue().split("\r")
    assert last.startswith("1,100 of 1,200 tokens at most, ")
    assert last.endswith(" tokens/s \x1b[K"), "and nothing of a longer one before it"
    progress.clear()
    assert shown.getvalue().endswith("\r\x1b[K"), "what comes then has the line for itself"


def test_generate_takes_the_name_of_a_model_in_the_local_cache(
    command: Callable[..., Done], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, commit = tmp_path / "models--org--name", "0" * 40
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = command(
        "generate", "--model", "org/name", "--prompt", PROMPTS[0], "--memory", "8MB", "--max-new-tokens", "4"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == in_memory(folder, PROMPTS[0], 4)
    done = command("generate", "--model", "org/other", "--prompt", PROMPTS[0], "--memory", "8MB")
    assert done.returncode == 1
    assert "hf download org/other" in done.stderr


def test_a_model_that_memory_holds_has_nothing_to_read(folder: Path) -> None:
    model = deepnvme.stream(folder, memory="1GB")
    question = torch.tensor([[1, 2, 3]])
    measured = measure(model.streaming, lambda: model(question), rounds=1)
    assert measured.bytes_read == 0
