"""TensorNVMe from its source package; ``python -m trainbench.tensornvme_op`` builds it, which takes minutes.

Its own set-up wants cmake, fetches liburing and libaio from their repositories, installs both into the home folder
and writes to ``~/.bashrc``. Here torch compiles its C++ with the libaio that is there, without io_uring, into the
virtual environment and nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

_VERSION = "0.1.0"
_SOURCES = ("offload.cpp", "aio.cpp", "space_mgr.cpp")


def _home() -> Path:
    return Path(sys.prefix) / "tensornvme"


def _unpacked() -> Path:
    return _home() / f"tensornvme-{_VERSION}"


def load() -> Any:
    """Return the package.

    Raises:
        ImportError: it has not been built here, or does not run.
    """
    if not (_unpacked() / "tensornvme" / "_C.so").exists():
        raise ImportError("it has not been built here (make tensornvme; g++ and libaio-dev are wanted)")
    sys.path.insert(0, str(_unpacked()))
    # The libraries that it is linked with.
    import torch  # noqa: F401, PLC0415

    return __import__("tensornvme")


def build() -> None:
    """Fetch the source package, and compile it."""
    home = _home()
    home.mkdir(exist_ok=True)
    name = f"tensornvme-{_VERSION}.tar.gz"
    if not (home / name).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "tensornvme"]
        command += ["--no-build-isolation", "--dest", str(home), f"tensornvme=={_VERSION}"]
        subprocess.run(command, check=True)
    with tarfile.open(home / name) as packed:
        packed.extractall(home, filter="data")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from torch.utils import cpp_extension  # noqa: PLC0415

    root = _unpacked()
    cpp_extension.load(
        name="_C",
        sources=[str(root / "csrc" / one) for one in _SOURCES],
        extra_include_paths=[str(root / "include"), str(root / "csrc")],
        extra_cflags=["-DDISABLE_URING"],
        extra_ldflags=["-laio"],
        build_directory=str(root / "tensornvme"),
    )


if __name__ == "__main__":
    build()
    print("TensorNVMe:", _unpacked().name)
