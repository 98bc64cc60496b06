"""Train a real language model with a real DeepSpeed. The tests of this folder run this program:

    PYTHONPATH=../shared python zero_program.py '{"op": "ours", "answers": "answers", "text": "text", "jobs": [...]}'

Each job is one `deepspeed.initialize` and some steps. The answer is one line of JSON for each job, in the file that
`answers` names, followed by the rank of the process.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import deepnvme.deepspeed
from deepnvme._utils.patches import Patches
from deepnvme.deepspeed import _workarounds
from small_transformer import Transformer

# Some parameters of each model are large enough for DeepSpeed to swap (1 MiB), even halved for two ranks. Others are
# not.
VOCABULARY = 2816
CONTEXT = 32
WIDTH = 384
HEADS = 8
LAYERS = 2
BATCH = 2
SEED = 11


def tokens() -> torch.Tensor:
    """Return the text as words. The rarest words are merged into one."""
    words = re.findall(r"\w+|\W", Path(json.loads(sys.argv[1])["text"]).read_text())
    order = {word: place for place, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([min(order[word], VOCABULARY - 1) for word in words])


def batches(rank: int) -> Any:
    """Yield pieces of the text, forever."""
    text = tokens()
    generator = torch.Generator().manual_seed(1000 * SEED + rank)
    while True:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def initialise(job: dict[str, Any]) -> Any:
    """Return the engine."""
    deepspeed = importlib.import_module("deepspeed")
    torch.manual_seed(SEED)
    is_sharded = job.get("born_sharded")
    with deepspeed.zero.Init(config_dict_or_path=job["config"]) if is_sharded else nullcontext():
        model = Transformer(VOCABULARY, CONTEXT, job.get("width", WIDTH), HEADS, LAYERS)
    parameters = None if job.get("inference") else list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=job["config"], model_parameters=parameters)
    return engine


def losses(engine: Any, steps: int, skip: int) -> list[float]:
    """Train on the pieces after the first `skip`. Returns the loss of each."""
    found = []
    data = itertools.islice(batches(torch.distributed.get_rank()), skip, skip + steps)
    for text in data:
        logits = engine(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def logits(engine: Any) -> list[str]:
    """Return the bits of the model's output, three times."""
    engine.module.eval()
    text = next(batches(0))[:, :-1]
    with torch.no_grad():
        return [hashlib.sha256(engine(text).float().numpy().tobytes()).hexdigest() for _ in range(3)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job."""
    engine = initialise(job)
    steps = job["steps"] * job["config"]["gradient_accumulation_steps"]
    answer: dict[str, Any] = {"name": job["name"]}
    if "load" in job:
        answer["loaded"] = engine.load_checkpoint(job["load"])[0]
    answer["losses"] = logits(engine) if job.get("inference") else losses(engine, steps, job.get("skip", 0))
    if "save" in job:
        engine.save_checkpoint(job["save"])
        answer["after"] = losses(engine, job["more"], steps)
    nvme = [part.get("nvme_path") for part in job["config"]["zero_optimization"].values() if isinstance(part, dict)]
    answer["swapped"] = sorted({path.name for folder in nvme if folder for path in Path(folder).rglob("*.swp")})
    engine.destroy()
    return answer


def main() -> int:
    """Run all jobs."""
    errand = json.loads(sys.argv[1])
    if errand["op"] == "ours":
        deepnvme.deepspeed.install()
    deepspeed = importlib.import_module("deepspeed")
    if errand["op"] == "theirs":
        # Without this setting, it hangs when it reads parameters ahead, with any op.
        name = "deepspeed.runtime.swap_tensor.partitioned_param_swapper"
        _workarounds.apply(importlib.import_module(name), Patches(), is_new=False)
    torch.set_num_threads(1)
    # A communication op that takes minutes to compile; gloo works as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank = torch.distributed.get_rank()
    with Path(f"{errand['answers']}{rank}").open("w") as answers:
        for job in errand["jobs"]:
            answer = run(job)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            gc.collect()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
