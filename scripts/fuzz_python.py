"""Run one fuzz target in Python: ``python scripts/fuzz_python.py TARGET CORPUS SEEDS [-option=value ...]``.

``scripts/fuzz.py`` calls this with the options of libFuzzer, and with atheris on ``PYTHONPATH``, which drives libFuzzer
by the coverage of the package's own modules.
"""

from __future__ import annotations

import importlib
import json
import random
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import atheris

TESTS = Path(__file__).resolve().parent.parent / "python" / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "shared")]
BYTES_MAX = 1 << 30

# Not measured: libraries, whose branches say little about the package's parsers.
import torch  # noqa: E402
import torch.distributed.checkpoint.state_dict_loader  # noqa: E402
import torch.distributed.checkpoint.state_dict_saver  # noqa: E402

with atheris.instrument_imports(include=["deepnvme"]):
    import deepnvme._checkpoint.dcp.reader
    import deepnvme._checkpoint.lazy
    import deepnvme._checkpoint.load_into
    import deepnvme._checkpoint.safe_unpickler
    import deepnvme._rows.commands
    import deepnvme._stream.huggingface
    import deepnvme.optim  # noqa: F401

    targets: Any = importlib.import_module("fuzz.targets")
mutators: Any = importlib.import_module("mutators")


def mutate(data: bytes, size_max: int, seed: int) -> Any:
    """Change the meaning of a document or pickle, or some bytes of any input."""
    dice = random.Random(seed)  # noqa: S311 (reproducible)
    if dice.random() < 0.5:  # noqa: PLR2004 (half of them)
        try:
            if sys.argv[1] == "objects":
                return (data[:1] + mutators.mutate_pickle(data[1:], dice))[:size_max]
            return mutators.as_text(mutators.mutate_json(json.loads(data), dice), dice)[:size_max]
        except (ValueError, RecursionError, UnicodeError):
            pass
    return bytes(atheris.Mutate(data, size_max))


def main() -> None:
    """Fuzz until the time is over."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        body = targets.TARGETS[name](folder, targets.Watch(folder))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + BYTES_MAX
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        atheris.Setup([sys.argv[0], *sys.argv[2:]], body, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
