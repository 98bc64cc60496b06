"""Create the environment `.venv/` and install into it. Standard library only; `make` calls it.

    python3 scripts/setup.py venv                     create .venv, with uv in it if available
    .venv/bin/python scripts/setup.py extras dev ...  install extras of pyproject.toml
    .venv/bin/python scripts/setup.py file LIST.txt   install a requirements file
    .venv/bin/python scripts/setup.py wheel           build the release wheel and install it
    .venv/bin/python scripts/setup.py frameworks LIST.txt  create .venv-frameworks on top of .venv, for some tests only
    .venv/bin/python scripts/setup.py serving FOLDER  create .venv-serving with model servers, likewise
    .venv/bin/python scripts/setup.py torch 2.12.0    create .venv-torch with another release of torch, likewise
    .venv/bin/python scripts/setup.py docs            create .venv-docs with the tools of the documentation

Packages come from the indexes that the user's pip is configured for. uv is only a faster pip: it is used if every
setting of that pip has a counterpart in uv. Otherwise, or if uv fails, pip is used.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import environments

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST_PYTHON = (3, 10)

# pip's setting -> uv's environment variable. None: irrelevant for uv.
UV_COUNTERPART = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "no-cache-dir": "UV_NO_CACHE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "disable-pip-version-check": None,
    "root-user-action": None,
    "break-system-packages": None,
    "require-virtualenv": None,
    "no-input": None,
    "progress-bar": None,
    "retries": None,
}
COMMA_SEPARATED = {"UV_FIND_LINKS"}


def main(arguments: list[str]) -> int:
    """Run the requested action. Return the exit status of the tool, or 2 for a usage error."""
    alone = {"venv": make_venv, "wheel": build_wheel, "docs": make_docs_venv}
    if len(arguments) == 1 and arguments[0] in alone:
        return alone[arguments[0]]()
    if len(arguments) > 1 and arguments[0] == "extras":
        return install([line for name in arguments[1:] for line in extra(name)])
    if len(arguments) == 2 and arguments[0] == "file":  # noqa: PLR2004
        return install(["--requirement", arguments[1]])
    if len(arguments) == 2 and arguments[0] in {"frameworks", "serving", "torch"}:  # noqa: PLR2004
        return environments.make(*arguments)
    print(__doc__, file=sys.stderr)
    return 2


def make_venv() -> int:
    """Create `.venv/` with this interpreter, or report what the machine lacks."""
    found = sys.version_info[:3]
    if found < OLDEST_PYTHON:
        return refuse(f"Python {found[0]}.{found[1]} is too old: 3.10 or newer is needed.")
    try:
        import ensurepip  # noqa: F401, PLC0415
    except ImportError:
        return refuse(
            f"{sys.executable} cannot make virtual environments: its ensurepip module is missing.\n"
            f"On Debian and Ubuntu, install the package python3-venv (or python{found[0]}.{found[1]}-venv)."
        )
    say(f"making .venv with Python {'.'.join(map(str, found))}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=False).returncode
    if made == 0 and subprocess.run([*pip(), "install", "--quiet", "uv"], check=False).returncode != 0:
        say("uv could not be installed; using pip, which is slower")
    return made


def install(requirements: list[str]) -> int:
    """Install with uv if it can replace pip, otherwise with pip."""
    uv = VENV / "bin" / "uv"
    settings = uv_environment(pip_settings())
    if uv.exists() and settings is not None:
        command = [str(uv), "pip", "install", "--python", str(PYTHON), *requirements]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False).returncode == 0:
            return 0
        say("uv failed; trying again with pip")
    return subprocess.run([*pip(), "install", *requirements], cwd=ROOT, check=False).returncode


def make_docs_venv() -> int:
    """Create `.venv-docs/` with the extra `docs`."""
    return environments.make_docs(extra("docs"))


def build_wheel() -> int:
    """Build the release wheel with maturin, and install that file."""
    wheels = ROOT / "target" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    build: list[str | Path] = [VENV / "bin" / "maturin", "build", "--release", "--compatibility", "linux"]
    status = subprocess.run([*build, "--interpreter", PYTHON, "--out", wheels], cwd=ROOT, check=False).returncode
    if status != 0:
        return status
    (wheel,) = wheels.glob("deepnvme-*.whl")
    command = [*pip(), "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    return subprocess.run(command, check=False).returncode


def extra(name: str) -> list[str]:
    """Return the requirements of one extra of pyproject.toml."""
    # The standard library has the parser from 3.11 on; on 3.10 use pip's copy.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    extras = parser.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return list(extras[name])


def pip() -> list[str]:
    """Return the command of the pip of `.venv/`."""
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]


def pip_settings() -> dict[str, str]:
    """Return the settings of the user's pip from files and variables; the more specific one wins."""
    listing = subprocess.run([*pip(), "config", "list"], capture_output=True, text=True, check=True).stdout
    settings: dict[str, str] = {}
    for scope in ("global.", "install.", ":env:."):  # pip's own order of precedence
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(scope):
                settings[key.removeprefix(scope)] = str(ast.literal_eval(value))
    return settings


def uv_environment(settings: dict[str, str]) -> dict[str, str] | None:
    """Translate the settings for uv, or return None if one has no counterpart.

    uv variables that the user has set are kept.
    """
    # pip looks for the best version in all indexes. uv would stop at the first index that has the name.
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for key, value in settings.items():
        if key not in UV_COUNTERPART:
            return None
        name = UV_COUNTERPART[key]
        if name is not None:
            environment[name] = ("," if name in COMMA_SEPARATED else " ").join(value.split())
    return {name: value for name, value in environment.items() if name not in os.environ}


def refuse(reason: str) -> int:
    """Report what is missing, and how to choose another interpreter."""
    say(f"{reason}\nTo use another interpreter: make PYTHON=python3.12 ...")
    return 1


def say(text: str) -> None:
    """Print to stderr."""
    print(f"setup: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
