"""``python -m streambench.table``: generate with a model whose table of per-layer embeddings stays on disk.

A Gemma 3n of random bf16 weights generates in memory and with ``deepnvme.stream``, in alternating rounds. The
second has memory for all weights but the table. Both must generate the same tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import cache, command
from common.generation import generate
from common.round_order import order

_LAYERS, _LAYER_COLUMNS, _VOCABULARY = 10, 256, 32_000
_PROMPT_TOKENS = 64
# For slots and rows, in addition to the weights that stay in memory.
_MORE, _MORE_BYTES = 1.15, 100_000_000
OURS, REFERENCE = "deepnvme.stream", "in memory"


def make_model(folder: Path, table_bytes: int) -> None:
    """Write a model with a table of about this size."""
    import transformers  # noqa: PLC0415

    rows = max(table_bytes // (_LAYERS * _LAYER_COLUMNS * torch.bfloat16.itemsize), _VOCABULARY)
    config = transformers.Gemma3nTextConfig(
        vocab_size=_VOCABULARY,
        vocab_size_per_layer_input=rows,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        hidden_size_per_layer_input=_LAYER_COLUMNS,
        num_kv_shared_layers=2,
        laurel_rank=32,
        layer_types=["sliding_attention", "full_attention"] * (_LAYERS // 2),
        activation_sparsity_pattern=[0.0] * _LAYERS,
        altup_num_inputs=2,
    )
    torch.manual_seed(0)
    transformers.Gemma3nForCausalLM(config).bfloat16().save_pretrained(folder)


def measure(folder: Path, rounds: int, new_tokens: int) -> dict[str, Any]:
    """Generate with both in turns."""
    import deepnvme  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # Pages of the mapped file could not be dropped from the page cache.
    for parameter in reference.parameters():
        parameter.data = parameter.data.clone()
    sizes = {name: each.nbytes for name, each in reference.named_parameters()}
    table = sizes["model.embed_tokens_per_layer.weight"]
    memory = int((sum(sizes.values()) - table) * _MORE) + _MORE_BYTES
    ours = deepnvme.stream(folder, memory=memory)
    models = {REFERENCE: reference, OURS: ours}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    read = 0.0
    for index in range(rounds + 1):
        prompt = torch.randint(3, _VOCABULARY, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(index))
        tokens = []
        for name in order(list(models), index):
            for path in folder.glob("*.safetensors"):
                cache.make_cold(path)
            before = ours.streaming.counters()["bytes_read"]
            began = time.perf_counter()
            tokens.append(generate(models[name], prompt, new_tokens))
            # The first round is not counted: it brings the other weights into memory.
            if index > 0:
                seconds[name].append(time.perf_counter() - began)
                read += ours.streaming.counters()["bytes_read"] - before
        if not torch.equal(*tokens):
            raise RuntimeError("the two models generated different tokens")
    ours.streaming.close()
    ratios = [theirs / mine for mine, theirs in zip(seconds[OURS], seconds[REFERENCE], strict=True)]
    return {
        "table_bytes": table,
        "model_bytes": sum(sizes.values()),
        "memory_bytes": memory,
        "tokens_per_s": {name: sorted(new_tokens / one for one in each) for name, each in seconds.items()},
        "ratio": median(ratios),
        "ratios": sorted(ratios),
        "bytes_read_per_token": read / rounds / (new_tokens + _PROMPT_TOKENS),
    }


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="streambench.table", description=__doc__)
    command.add_options(parser, rounds=7)
    parser.add_argument("--mb", type=int, default=1300, help="approximate size of the table in MB (10^6 bytes)")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def run(scratch: Path) -> Path:
        make_model(scratch / "model", arguments.mb * 1_000_000)
        loads = [os.getloadavg()[0]]
        measured = measure(scratch / "model", arguments.rounds, arguments.new_tokens)
        for name, each in measured["tokens_per_s"].items():
            print(f"{name:16} {median(each):6.2f} tokens/s ({each[0]:.2f} to {each[-1]:.2f})")
        print(f"deepnvme.stream: {measured['ratio']:.3f} of the speed in memory (goal: 0.95)")
        loads.append(os.getloadavg()[0])
        fields = {**measured, "rounds": arguments.rounds, "threads": arguments.threads, "load": loads}
        return command.write_record(arguments.results, "stream-table", scratch, fields)

    return command.run_in_scratch(arguments.scratch, "stream-table", run)


if __name__ == "__main__":
    sys.exit(main())
