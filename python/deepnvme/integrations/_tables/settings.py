"""Which embedding tables stay on disk, and the memory of their rows: settings in the environment.

The environment reaches every process of a server, with any load format.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from deepnvme._utils.public import parse_bytes
from deepnvme.errors import InvalidArgumentError

TABLES = "DEEPNVME_TABLES"
MEMORY = "DEEPNVME_TABLES_MEMORY"

# Room for a quarter of the rows of Gemma 3n's table, or for several million rows of an n-gram table. The rows that a
# batch needs at a time take far less.
MEMORY_BYTES = 1 << 30

# Name of a table -> its tensors in a checkpoint.
_TENSORS = {
    "embed_tokens_per_layer": r"\bembed_tokens_per_layer\.weight$",
    "ngram_embedding": r"\bngram_embedding\.(shard_\d+\.)?weight$",
    "engram": r"\bengram\.embed\.(weight|scale)$",
    "oe_embedder": r"\bngram_embeddings\.embedders\.\d+\.weight$",
}
NAMES = tuple(_TENSORS)


@dataclass(frozen=True)
class TableSettings:
    """The tables that stay on disk.

    Attributes:
        names: names of the tables that may stay on disk.
        bytes_min: size from which a table stays on disk.
        memory: bytes for the rows of all tables of a model, for each rank.
    """

    names: frozenset[str] = frozenset()
    bytes_min: int = 0
    memory: int = MEMORY_BYTES

    @classmethod
    def from_environment(cls) -> TableSettings:
        """Read the environment.

        Raises:
            ValueError: a variable has no valid value.
        """
        text = os.environ.get(TABLES, "").strip()
        memory = parse_bytes(os.environ.get(MEMORY, MEMORY_BYTES), MEMORY)
        if not text:
            return cls(memory=memory)
        if text == "all":
            return cls(frozenset(NAMES), memory=memory)
        if text[0].isdigit():
            return cls(frozenset(NAMES), parse_bytes(text, TABLES), memory)
        names = frozenset(name.strip() for name in text.split(",") if name.strip())
        unknown = sorted(names.difference(NAMES))
        if unknown or not names:
            msg = f"{TABLES} is {text!r}; it must be all, a size such as 1GB, or some of {', '.join(NAMES)}"
            raise InvalidArgumentError(msg)
        return cls(names, memory=memory)

    @property
    def is_enabled(self) -> bool:
        """Whether any table may stay on disk."""
        return bool(self.names)

    def keeps_on_disk(self, name: str, nbytes: int) -> bool:
        """Return whether a table of this name and size stays on disk."""
        return name in self.names and nbytes >= self.bytes_min

    def is_tensor_of_table(self, name: str) -> bool:
        """Return whether a tensor of a checkpoint may belong to a table on disk, by its name."""
        return any(re.search(_TENSORS[table], name) for table in self.names)
