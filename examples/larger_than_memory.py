# %% [markdown]
"""A model larger than memory, on a laptop.

This walk-through makes a model, generates tokens with a quarter of its weights in memory, and then packs it into fewer
bytes. Run it cell by cell in an editor that knows `# %%`, or as a program:

Usage: python examples/larger_than_memory.py [GB] [FOLDER]

GB is the size of the model, 0.25 by default.

The folder should be on an NVMe drive: its speed decides how fast tokens come.
"""

import gc
import json
import resource
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

try:
    import torch
    import transformers
except ImportError:
    sys.exit("This example needs torch and transformers: pip install torch transformers")
import deepnvme

MODEL_BYTES = int(float(sys.argv[1] if sys.argv[1:] else 0.25) * 1e9)
scratch = tempfile.TemporaryDirectory(dir=sys.argv[2] if sys.argv[2:] else None)
folder = Path(scratch.name)

# %% [markdown]
# ## Make the model
#
# A real model comes from a hub, as a folder with `config.json` and safetensors files. This one has the same layout and
# random weights in bf16. On the meta device it has shapes and no memory, so that we can write one file for each layer
# and never hold the whole model. The index says which file has which tensor.

# %%
HIDDEN, WIDE, VOCABULARY = 1024, 2816, 4096
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE + 2 * HIDDEN)
EMBEDDING_BYTES = 2 * HIDDEN * VOCABULARY

config = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    num_hidden_layers=max(4, round((MODEL_BYTES - 2 * EMBEDDING_BYTES) / LAYER_BYTES)),
    num_attention_heads=16,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)
with torch.device("meta"):
    shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}

plain = folder / "plain"
config.save_pretrained(plain)
torch.manual_seed(0)
index: dict[str, str] = {}
for layer in sorted({name.rpartition("layers.")[2].partition(".")[0] for name in shapes}):
    names = [name for name in shapes if name.rpartition("layers.")[2].partition(".")[0] == layer]
    weights = {name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, 0.02) for name in names}
    deepnvme.save(weights, plain / f"layer-{layer}.safetensors")
    index |= dict.fromkeys(names, f"layer-{layer}.safetensors")
(plain / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
del weights
print(f"{config.num_hidden_layers} layers, {len(index)} tensors in {len(set(index.values()))} files")

# %% [markdown]
# ## Measure memory
#
# The kernel knows how much memory this process has (its resident set). A thread looks at it every few milliseconds, so
# that we see the peak of each run, and not of all of them.


# %%
def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class PeakMemory:
    """Measure how far memory rises above its level at the beginning of a block."""

    def __enter__(self) -> None:
        self.before, self.rise, self.ended = resident_bytes(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        """Look until the block ends."""
        while not self.ended.wait(0.005):
            self.rise = max(self.rise, resident_bytes() - self.before)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


# %% [markdown]
# ## Generate
#
# `deepnvme.stream` returns the Hugging Face model. `memory` bounds its weights, here to a quarter of the model. Before
# a layer runs, its weights are in memory; while it runs, the next ones are read. Activations, the cache of keys and
# values, and the buffers of the engine come on top, so that memory rises a little more.
#
# Each byte that is read serves all prompts of the batch. The first run imports code and starts threads, so that we
# measure the second one.


# %%
@dataclass
class Result:
    """The figures of one run."""

    disk_bytes: int
    read_bytes: int
    gb_per_s: float
    rise_bytes: int


memory = MODEL_BYTES // 4
prompts = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))


def run(path: Path, new_tokens: int = 6) -> tuple[torch.Tensor, Result]:
    """Generate tokens with the model of a folder."""
    peak = PeakMemory()
    with peak:
        model = deepnvme.stream(path, memory=memory)
        model.generate(prompts, max_new_tokens=1, do_sample=False, pad_token_id=0)
        before = model.streaming.stats()
        tokens = model.generate(
            prompts, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        after = model.streaming.stats()
        model.streaming.close()
    del model
    gc.collect()  # what is left of this run would count for the next one
    read, busy_s = after.bytes_read - before.bytes_read, after.disk_busy_s - before.disk_busy_s
    disk_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    speed = read / busy_s / 1e9 if busy_s else 0.0
    return tokens, Result(disk_bytes, read, speed, peak.rise)


transformers.utils.logging.disable_progress_bar()
run(plain, 1)
plain_tokens, plain_result = run(plain)
for row in plain_tokens[:, prompts.shape[1] :].tolist():
    print("tokens:", *row)
print(f"the model has {plain_result.disk_bytes / 1e6:.0f} MB, memory rose by {plain_result.rise_bytes / 1e6:.0f} MB")

# %% [markdown]
# ## Pack it
#
# Where the drive is the bottleneck, fewer bytes are more tokens. `deepnvme pack` writes a new folder with the same
# model. `lossless` compresses the exponents of the weights, and loses no bit. `int8` rounds matrices to eight bits.


# %%
def pack(form: str) -> Path:
    """Pack the model with the command that you would type, and return the new folder."""
    target = folder / form
    command = [sys.executable, "-m", "deepnvme", "pack", str(plain), str(target), "--dtype", form]
    subprocess.run(command, check=True, capture_output=True)
    return target


results = {"bf16": plain_result}
for form in ("lossless", "int8"):
    tokens, results[form] = run(pack(form))
    print(f"{form}: {(tokens == plain_tokens).float().mean():.0%} of the tokens are the same")

# %% [markdown]
# ## Compare
#
# Some of the packed weights stay in memory as they are on disk, so that a run reads less than the sizes suggest.
# This model is too small to show the speed: `deepnvme stream-bench` measures that. On few CPUs, decoding can cost more
# than the drive gains: then packing does not pay. `deepnvme pack --dry-run` says that in advance.

# %%
print(f"{'':9} {'MB on disk':>10} {'MB read':>8} {'GB/s':>6} {'memory, MB':>11}")
for form, result in results.items():
    print(
        f"{form:9} {result.disk_bytes / 1e6:10.0f} {result.read_bytes / 1e6:8.0f} {result.gb_per_s:6.2f} "
        f"{result.rise_bytes / 1e6:11.0f}"
    )
print(f"memory for weights: {memory / 1e6:.0f} MB of {results['bf16'].disk_bytes / 1e6:.0f}")

# %%
scratch.cleanup()
