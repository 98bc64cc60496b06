"""Generate tokens with a Hugging Face model whose weights stay on disk.

The model is a small Llama with random weights. Its tokens are those of the same model in memory.

Usage: python examples/stream_generate.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

try:
    import torch
    import transformers
except ImportError:
    sys.exit("This example needs torch and transformers: pip install torch transformers")
import deepnvme


def make_model(folder: Path) -> transformers.LlamaForCausalLM:
    """Save a model as Hugging Face lays it out: config.json and model.safetensors."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, architectures=["LlamaForCausalLM"])
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(folder)
    deepnvme.save(model.state_dict(), folder / "model.safetensors")
    return model


def main(folder: Path) -> None:
    """Compare tokens of a streamed model with those of the model in memory."""
    in_memory = make_model(folder)
    prompt = torch.randint(4096, (4, 8))  # four prompts of eight tokens
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = in_memory.generate(prompt, **options)

    # At most 32 MB of weights are in memory at a time. While a layer runs, the next ones are read.
    model = deepnvme.stream(folder, memory="32MB")
    print(
        f"{model.streaming.model_bytes / 1e6:.0f} MB of weights, {model.streaming.memory_bytes / 1e6:.0f} MB of memory"
    )
    tokens = model.generate(prompt, **options)
    for row in tokens[:, 8:].tolist():
        print("tokens:", *row)

    stats = model.streaming.stats()
    print(f"{stats.tokens_per_s:.1f} tokens/s, prompts included, in {stats.steps} steps")
    print(f"{stats.bytes_read / 1e6:.0f} MB read at {stats.disk_gb_per_s:.2f} GB/s")
    print(f"{stats.hit_rate:.0%} of the layers were in memory when their turn came")
    print("same tokens as in memory:", torch.equal(tokens, expected))
    model.streaming.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
