"""Create environments on top of `.venv/`, for some tests and for the documentation.

They see its packages, so little is installed twice.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ROOT / ".venv-frameworks"
SERVING = ROOT / ".venv-serving"
TORCH = ROOT / ".venv-torch"
DOCS = ROOT / ".venv-docs"


def make(kind: str, argument: str) -> int:
    """Create the environment of a kind."""
    makers = {"frameworks": make_frameworks, "serving": make_serving, "torch": make_torch}
    return makers[kind](argument)


def make_frameworks(requirements: str) -> int:
    """Create `.venv-frameworks/`: training libraries with the torch of `.venv/`."""
    python = _make(FRAMEWORKS)
    # A second torch would take gigabytes.
    pins = FRAMEWORKS / "pins.txt"
    pins.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    return _install(python, "--constraint", pins, "--requirement", requirements)


def make_serving(folder: str) -> int:
    """Create `.venv-serving/`: model servers with the torch of `.venv/`, although they ask for another one.

    `servers.txt` lists the servers, which are installed without dependencies: those are gigabytes of another torch and
    of GPU kernels. `requirements.txt` lists what they need on the CPU.
    """
    python = _make(SERVING)
    pins = SERVING / "pins.txt"
    pins.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    requirements = Path(folder)
    status = _install(python, "--constraint", pins, "--requirement", requirements / "requirements.txt")
    return status or _install(python, "--no-deps", "--requirement", requirements / "servers.txt")


def make_torch(version: str) -> int:
    """Create `.venv-torch/`: another release of torch, with the CUDA libraries of which `.venv/` has other versions."""
    return _install(_make(TORCH), f"torch=={version}")


def make_docs(requirements: list[str]) -> int:
    """Create `.venv-docs/`: MkDocs and its plugins. They read the package's sources and import nothing of it."""
    return _install(_make(DOCS), *requirements)


def _make(folder: Path) -> Path:
    """Create an environment that sees the packages of `.venv/` after its own. Return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    ask: list[str | Path] = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    shared = sysconfig.get_path("purelib")
    packages.joinpath("shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return python


def _install(python: Path, *arguments: str | Path) -> int:
    # pip, not uv: it counts the packages of `.venv/` as installed.
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
