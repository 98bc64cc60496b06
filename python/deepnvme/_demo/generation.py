"""Generate with weights on disk: ``accelerate``'s disk offload beside ``deepnvme.stream``."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._demo.comparison import Comparison, WrongResultError, drop
from deepnvme._stream.benchmark import make_llama
from deepnvme._stream.streaming import stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 2
NEW_TOKENS = 6
_PROMPT_TOKENS = 32
# Room for the embedding of a small model, its largest layer.
_MEMORY_MIN = 300_000_000


def compare(nbytes: int, folder: Path, step: Callable[[str], None]) -> Comparison:
    """Make a Llama-shaped model of random weights, and alternate both tools.

    Each tool has memory for a quarter of the weights, and at least 300 MB.

    Raises:
        WrongResultError: the tools generated different tokens.
    """
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    step("make a model")
    model_folder = folder / "model"
    made = make_llama(model_folder, nbytes, torch.float32)
    memory = max(made // 4, _MEMORY_MIN)
    ids = torch.randint(0, 32_000, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    found = Comparison(
        "generate",
        "tokens/s",
        "accelerate",
        f"{made / 1e9:.2f} GB of weights on disk, {memory / 1e9:.2f} GB of memory for them",
    )
    openers: dict[str, Callable[[], Any]] = {
        "accelerate": lambda: open_offloaded(model_folder, memory, folder / "offload"),
        "deepnvme": lambda: stream(model_folder, memory=memory),
    }
    tokens: dict[str, list[int]] = {}
    for number in range(ROUNDS):
        for name in openers if number % 2 == 0 else reversed(openers):
            step(f"{name}: generate, round {number + 1} of {ROUNDS}")
            model = openers[name]()
            # A model that does not fit into memory would not stay in the page cache. Both could read it from there.
            rate, tokens[name] = generate(model, ids, sorted(model_folder.glob("*.safetensors")))
            (found.ours if name == "deepnvme" else found.theirs).append(rate)
            if name == "deepnvme":
                model.streaming.close()
            del model
    if tokens["accelerate"] != tokens["deepnvme"]:
        raise WrongResultError(f"accelerate generated {tokens['accelerate']}, deepnvme {tokens['deepnvme']}")
    return found


def open_offloaded(folder: Path, memory: int, offload: Path) -> Any:
    """Open a model as ``accelerate`` offloads it, with as many layers in memory as fit."""
    import transformers  # noqa: PLC0415

    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        empty = transformers.AutoModelForCausalLM.from_config(config)
    layers = empty.model.layers
    layer = sum(parameter.nbytes for parameter in layers[0].parameters())
    # Leave room for the largest module on disk, which is read into memory while it runs.
    fit = max(0, (memory - max(layer, empty.lm_head.weight.nbytes)) // layer)
    places = {f"model.layers.{index}": "cpu" if index < fit else "disk" for index in range(len(layers))}
    ends = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map={**places, **ends}, offload_folder=offload, trust_remote_code=False
    )
    return opened.eval()


def generate(model: Any, ids: torch.Tensor, files: list[Path]) -> tuple[float, list[int]]:
    """Generate greedily. Returns tokens a second, and the tokens.

    ``files`` leave the page cache before each token, as if the machine's memory were full. That time does not count.
    """
    dropped_s = 0.0

    def forget(*_: object) -> None:
        nonlocal dropped_s
        began = time.perf_counter()
        for path in files:
            drop(path)
        dropped_s += time.perf_counter() - began

    hook = model.register_forward_pre_hook(forget, prepend=True)
    try:
        began = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        took_s = time.perf_counter() - began - dropped_s
    finally:
        hook.remove()
    return NEW_TOKENS / took_s, answer[0, ids.shape[1] :].tolist()
