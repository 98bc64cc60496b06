"""Compile DeepSpeed's own ops into this environment, once, for `make test-frameworks`. Failures are named."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The first one includes `pin_memory`.
OPS = ("AsyncIOBuilder", "CPUAdamBuilder")


def path_with_ninja() -> str:
    """Return `PATH` for torch, which needs ninja even for ops that are built. It may be in the environment below."""
    files = importlib.metadata.files("ninja") or []
    folders = [str(Path(file.locate()).resolve().parent) for file in files if file.name == "ninja"]
    return os.pathsep.join([*folders, os.environ["PATH"]])


def main() -> None:
    """Build all ops that can be built."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ["PATH"] = path_with_ninja()
    builders = importlib.import_module("deepspeed.ops.op_builder")
    for name in OPS:
        _build(getattr(builders, name)(), name)


def _build(builder: Any, name: str) -> None:
    try:
        builder.load()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"skipped: DeepSpeed's {name} does not build here (it needs g++ and libaio-dev): {error}\n")


if __name__ == "__main__":
    main()
