"""Build and load DeepSpeed's own async_io op; `python -m common.deepspeed_op` only builds it.

The op is compiled once, from the sources inside the installed package, into the virtual environment; that takes
minutes and is never timed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def load() -> Any:  # noqa: ANN401 - a compiled module without stubs
    """Return the compiled op, building it if needed.

    Raises:
        ImportError: when DeepSpeed is not installed.
        RuntimeError: when the op cannot be built, for example without libaio's headers.
    """
    home = Path(sys.prefix) / "deepspeed-ops"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(home))
    # Host memory only: the accelerator is not part of the comparison.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # ninja is in the interpreter's folder.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise RuntimeError("DeepSpeed's async_io does not compile here; it needs g++ and libaio-dev")
    return builder.load(verbose=False)


if __name__ == "__main__":
    print("DeepSpeed's async_io op:", Path(load().__file__).name)
