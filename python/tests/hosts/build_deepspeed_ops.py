"""Compile DeepSpeed's own ops into this environment, once; `make test-hosts` runs it. What cannot be built is named."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The first brings `pin_memory` with it.
OPS = ("AsyncIOBuilder", "CPUAdamBuilder")


def path_with_ninja() -> str:
    """`PATH` for torch, which asks for ninja also where an op is built already; it may lie in the environment below."""
    files = importlib.metadata.files("ninja") or []
    folders = [str(Path(file.locate()).resolve().parent) for file in files if file.name == "ninja"]
    return os.pathsep.join([*folders, os.environ["PATH"]])


def main() -> None:
    """Build all that can be built."""
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
