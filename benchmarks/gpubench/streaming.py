"""The row `stream`: generation with weights that exceed the GPU's share of memory, and stay on disk."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import deepnvme
import torch

from common import cache, generation
from common.measure import Sample, timed
from common.not_offered import NotOffered
from gpubench.data import Mismatch, size_text
from gpubench.rows import RoundLimits, RowResult, construct, make_cold_or_note, run_rounds
from gpubench.tool import Group, Setup, ToolBase

OURS = "deepnvme.stream"
CEILING = "model in GPU memory"

_LAYERS = 16
_HEAD_DIM = 64
_VOCABULARY = 2048
_BATCH, _PROMPT_TOKENS, _NEW_TOKENS = 4, 16, 8
#: Memory for weights on the GPU is the model's size divided by this.
_MEMORY_DIVISOR = 3


class Generator(ToolBase, ABC):
    """One way to open a model for generation."""

    #: Whether the files are dropped from the page cache before each token.
    starts_cold: ClassVar[bool] = True
    model: Any = None

    @abstractmethod
    def open(self, folder: Path, nbytes: int) -> None:
        """Open the model; not timed. A tool with weights on disk may keep a third of them on the GPU."""

    def bytes_read(self) -> int:
        """Return the bytes read from disk so far, if the tool counts them."""
        return 0

    def close(self) -> None:
        """See the base."""
        self.model = None
        gc.collect()


class Streamed(Generator):
    """``deepnvme.stream`` with its defaults."""

    name = OURS
    group: Group = "deepnvme"

    def open(self, folder: Path, nbytes: int) -> None:
        """See the base."""
        self.model = deepnvme.stream(folder, memory=nbytes // _MEMORY_DIVISOR, device=self.setup.gpu.compute)

    def bytes_read(self) -> int:
        """See the base."""
        return int(self.model.streaming.stats().bytes_read)

    def close(self) -> None:
        """See the base."""
        if self.model is not None:
            self.model.streaming.close()
        super().close()


class ModelOnGpu(Generator):
    """``from_pretrained``, all of it on the GPU."""

    name = CEILING
    group: Group = "ceiling"

    def open(self, folder: Path, nbytes: int) -> None:
        """See the base."""
        model = _transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = model.to(self.setup.gpu.compute).eval()
        if self.setup.gpu.compute == "cpu":
            # Its weights are pages of the files, which are read at their first use.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()


class Accelerate(Generator):
    """``from_pretrained`` with a device map: as many layers on the GPU as fit, the others on disk."""

    name = "accelerate, disk offload"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import accelerate  # noqa: PLC0415

        self._version: str = accelerate.__version__
        self._kept = 0

    def settings(self) -> str:
        """See the base."""
        return f"accelerate {self._version}, {self._kept} of {_LAYERS} layers on the GPU"

    def open(self, folder: Path, nbytes: int) -> None:
        """See the base: one layer's memory stays free for the layer that is loaded."""
        self._kept = max(0, _LAYERS // _MEMORY_DIVISOR - 1)
        device = self.setup.gpu.compute
        places = {f"model.layers.{index}": device if index < self._kept else "disk" for index in range(_LAYERS)}
        ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), device)
        self.model = (
            _transformers()
            .AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.bfloat16,
                device_map={**places, **ends},
                offload_folder=self.setup.scratch / "offload",
            )
            .eval()
        )


KINDS: tuple[type[Generator], ...] = (Streamed, ModelOnGpu, Accelerate)


def stream(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Generate a few tokens with each tool. All must generate the same."""
    row.title = (
        f"{_BATCH} sequences of {_PROMPT_TOKENS} + {_NEW_TOKENS} tokens from a model of about "
        f"{size_text(setup.model_nbytes)}, a third of it on the GPU; bytes are weights used"
    )
    row.ours, row.reference = OURS, CEILING
    row.note(setup.gpu.compute_note)
    try:
        import transformers  # noqa: F401, PLC0415
    except ImportError as error:
        raise NotOffered(f"transformers is not installed ({error})") from error
    tools = construct(row, KINDS, setup, limits)
    folder = setup.scratch / "model"
    nbytes, prompt, expected = _make_model(setup, folder)
    files = sorted(folder.glob("*.safetensors"))

    def once(one: Generator, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
        if is_first:
            one.open(folder, nbytes)
        for file in files:
            make_cold_or_note(file, row)
        before = one.bytes_read()
        sample, tokens = _generate(one, setup, prompt, nbytes, files if one.starts_cold else [])
        if not torch.equal(tokens, expected):
            raise Mismatch(f"{one.name} generates other tokens than the model in memory")
        speeds = {"tokens_per_s": _BATCH * _NEW_TOKENS / sample.wall_s}
        if read := one.bytes_read() - before:
            speeds["read_gb_per_s"] = read / sample.wall_s / 1e9
        return replace(sample, extra=speeds)

    return run_rounds(row, tools, limits, once)


def _generate(
    one: Generator, setup: Setup, prompt: torch.Tensor, nbytes: int, dropped: Sequence[Path]
) -> tuple[Sample, torch.Tensor]:
    """Generate greedily. Before each token, files are dropped from the page cache; that time is not counted."""
    dropping_s = 0.0

    def drop(*_: object) -> None:
        nonlocal dropping_s
        start = time.perf_counter()
        for file in dropped:
            cache.drop(file)
        dropping_s += time.perf_counter() - start

    def action() -> Any:
        tokens = generation.generate(one.model, prompt, _NEW_TOKENS)
        setup.gpu.wait()
        return tokens

    hook = one.model.register_forward_pre_hook(drop)
    try:
        sample, tokens = timed(action, nbytes * _NEW_TOKENS)
    finally:
        hook.remove()
    found: Any = tokens
    return replace(sample, wall_s=sample.wall_s - dropping_s), found[:, prompt.shape[1] :].cpu()


def _make_model(setup: Setup, folder: Path) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Save a random Llama. Returns its bytes, a prompt, and the tokens that it generates in memory."""
    transformers = _transformers()
    heads = max(1, int((setup.model_nbytes / 2 / _LAYERS / 12) ** 0.5) // _HEAD_DIM)
    width = heads * _HEAD_DIM
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    torch.manual_seed(5)
    with torch.device(setup.gpu.compute):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        prompt = torch.randint(0, _VOCABULARY, (_BATCH, _PROMPT_TOKENS))
    model.save_pretrained(folder)
    nbytes = sum(one.nbytes for one in model.parameters())
    del model
    # Load it as the tools do: buffers of a model that was made on the GPU may differ in the last bits.
    loaded = ModelOnGpu(setup)
    loaded.open(folder, nbytes)
    _, tokens = _generate(loaded, setup, prompt, nbytes, [])
    loaded.close()
    return nbytes, prompt, tokens


def _transformers() -> Any:
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
