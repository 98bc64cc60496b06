"""NVIDIA's own cuFile from torch's packages, without a GPU: it must leave no file behind, and return."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from .fake_driver import library

CHILD = """
    import ctypes, os, sys

    # As torch does with its CUDA packages: make the folder known.
    ctypes.CDLL(sys.argv[1])
    sys.path.insert(0, sys.argv[2])
    from gpu.fake_driver import FakeDriver, FakeGpu, library
    import torch
    import deepnvme

    class Patch:
        setattr = staticmethod(setattr)

    named = os.environ.get("DEEPNVME_LIBCUFILE")
    gpu = FakeGpu(FakeDriver(library()), Patch)
    # The fake driver replaces libcuda only, not libcufile.
    if named:
        os.environ["DEEPNVME_LIBCUFILE"] = named
    else:
        del os.environ["DEEPNVME_LIBCUFILE"]
    deepnvme.report()
    engine = deepnvme.Engine(gds="preferred", workers=1)
    engine.write(gpu.tensor(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)), "file")
    print(engine.stats().bytes_gds, engine.stats().gds_reason)
    engine.close()
"""

# Redirects reads of the kernel's module list to another file.
SHIM = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdarg.h>
    #include <stdio.h>
    #include <string.h>

    static const char *other(const char *path) {
        return path && !strcmp(path, "/proc/modules") ? MODULES : path;
    }
    #define FOPEN(name) FILE *name(const char *path, const char *mode) { \\
        return ((FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, #name))(other(path), mode); }
    #define OPEN(name) int name(const char *path, int flags, ...) { \\
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \\
        return ((int (*)(const char *, int, ...)) dlsym(RTLD_NEXT, #name))(other(path), flags, mode); }
    FOPEN(fopen) FOPEN(fopen64) OPEN(open) OPEN(open64)
"""


def libcufile() -> Path:
    """Find cuFile in torch's packages."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libcufile.so.0")]
    if not found:
        pytest.skip("torch's packages have no libcufile.so.0")
    return found[0]


def run(folder: Path, more: dict[str, str]) -> str:
    """Try GPUDirect Storage in an empty folder, in a process of its own, which must end."""
    fake_driver = library()
    if fake_driver is None:
        pytest.skip("the fake driver has not been built: cargo build -p deepnvme-fake-driver")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("CUFILE_", "DEEPNVME_"))}
    environment |= {"DEEPNVME_FAKE_DRIVER": str(fake_driver), "DEEPNVME_LIBCUDA": str(fake_driver)} | more
    tests = Path(__file__).parent.parent
    code = textwrap.dedent(CHILD)
    command = [sys.executable, "-c", code, str(libcufile()), str(tests)]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in folder.iterdir()] == ["file"], ended.stdout
    assert (folder / "file").stat().st_size == 1 << 20
    return ended.stdout


def test_it_is_not_started_where_it_would_never_come_back(tmp_path: Path) -> None:
    said = run(tmp_path, {})
    if Path("/proc/modules").exists():
        assert "compatibility mode" in said
    else:
        assert said.startswith("0 cuFile is not started: it would search for nvidia-fs in /proc/modules forever"), said


def test_its_log_is_nowhere_unless_the_user_says_where(tmp_path: Path) -> None:
    more = {"DEEPNVME_LIBCUFILE": str(libcufile())}
    if not Path("/proc/modules").exists():
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("cuFile hangs where there is no /proc/modules, and there is no gcc to make one up")
        modules, source, shim = tmp_path / "modules", tmp_path / "shim.c", tmp_path / "shim.so"
        modules.write_text("nvidia 1 0 - Live 0x0\n")
        source.write_text(textwrap.dedent(SHIM))
        define = f'-DMODULES="{modules}"'
        subprocess.run([compiler, define, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        more["LD_PRELOAD"] = str(shim)
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "compatibility mode" in run(folder, more)
    (folder / "file").unlink()
    # The user's setting wins.
    log = tmp_path / "said.log"
    run(folder, more | {"CUFILE_LOGFILE_PATH": str(log)})
    assert log.stat().st_size > 0
