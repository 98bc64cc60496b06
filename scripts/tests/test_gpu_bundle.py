"""Tests of the GPU bundle: its contents, and its messages if something is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import gpu_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    wheel = tmp_path / "deepnvme-0.1.0-cp310-abi3-linux_x86_64.whl"
    wheel.write_bytes(bytes(1000))
    folder = tmp_path / "bundle"
    assert gpu_bundle.make(folder, wheel) > 1000
    return folder


def run(script: Path, tools: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it with only these tools on the path."""
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(script), *arguments],
        env={"PATH": str(tools), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tool(tools: Path, name: str, script: str) -> None:
    tools.mkdir(exist_ok=True)
    bash = shutil.which("bash")
    (tools / name).write_text(f"#!{bash}\n{script}\n")
    (tools / name).chmod(0o755)


def test_it_holds_tests_and_benchmark_and_how_to_run_them(bundle: Path) -> None:
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert {
        "deepnvme-0.1.0-cp310-abi3-linux_x86_64.whl",
        "run.sh",
        "pyproject.toml",
        "python/tests/conftest.py",
        "python/tests/gpu/conftest.py",
        "python/tests/gpu/test_real.py",
        "benchmarks/gpubench/__main__.py",
        "benchmarks/common/measure.py",
    } <= names
    assert not [name for name in names if "__pycache__" in name]
    assert os.access(bundle / "run.sh", os.X_OK)


def test_made_again_it_holds_nothing_old(bundle: Path) -> None:
    (bundle / "old").write_bytes(b"")
    gpu_bundle.make(bundle, bundle.parent / "deepnvme-0.1.0-cp310-abi3-linux_x86_64.whl")
    assert not (bundle / "old").exists()


@pytest.mark.parametrize("arguments", [(), ("--look",)])
def test_without_a_driver(bundle: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for script in (bundle / "run.sh", gpu_bundle.ROOT / "scripts" / "gpu_tests.sh"):
        done = run(script, tmp_path / "no tools", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "test-gpu: no NVIDIA GPU here: nvidia-smi, which comes with the driver, is not found.\n"


def test_started_in_its_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle)
    done = run(Path("run.sh"), tmp_path / "no tools")
    assert done.stderr.startswith("test-gpu: no NVIDIA GPU here"), done.stderr


@pytest.mark.parametrize("status", [0, 6])
def test_without_a_gpu(bundle: Path, tmp_path: Path, status: int) -> None:
    tool(tmp_path / "tools", "nvidia-smi", f"echo No devices were found; exit {status}")
    done = run(bundle / "run.sh", tmp_path / "tools")
    assert done.returncode == 1
    assert done.stderr == 'test-gpu: no NVIDIA GPU here: nvidia-smi says "No devices were found".\n'


def test_without_torch_or_python(bundle: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tool(tools, "nvidia-smi", 'echo "GPU 0: one"')
    for name in ("mktemp", "rm"):
        (tools / name).symlink_to(str(shutil.which(name)))
    assert run(bundle / "run.sh", tools, "--look").stdout == "GPU 0: one\n"
    done = run(bundle / "run.sh", tools)
    assert (done.returncode, done.stderr) == (1, "test-gpu: there is no python3.\n")
    tool(tools, "python3", f'[[ $2 == *torch* ]] && exit 1; exec {sys.executable} "$@"')
    done = run(bundle / "run.sh", tools)
    assert done.returncode == 1
    assert done.stderr.startswith("test-gpu: python3 has no torch;")


# A fake python3 that has everything, creates environments from itself, and logs its arguments.
PYTHON = """
case "$*" in
    *"-m venv"*) mkdir -p "${!#}/bin" "${!#}/lib"; cp "$0" "${!#}/bin/python" ;;
    *sysconfig*) echo "${0%/*}/../lib" ;;
    *"import xdist"*) exit 0 ;;
    *"-m pytest"*) echo "$PWD: $*" >>"$ASKED"; echo "12 passed"; exit "$FAILED" ;;
    *"-m gpubench"*) echo "$PYTHONPATH: $*" >>"$ASKED"; echo "3 GB/s" ;;
esac
"""


@pytest.mark.parametrize("failed", ["0", "1"])
def test_the_benchmark_comes_after_the_tests(bundle: Path, tmp_path: Path, failed: str) -> None:
    tools, asked, out = tmp_path / "tools", tmp_path / "asked", tmp_path / "out"
    tool(tools, "nvidia-smi", 'echo "GPU 0: one"')
    tool(tools, "python3", PYTHON)
    (tools / "lib").mkdir()
    (tmp_path / "lib").mkdir()
    for name in ("cat", "cp", "grep", "mkdir", "mktemp", "paste", "rm", "sleep", "tail", "tee", "timeout"):
        (tools / name).symlink_to(str(shutil.which(name)))
    variables = {"ASKED": str(asked), "OUT": str(out), "FAILED": failed, "BENCH": "--mib 64"}
    done = run(bundle / "run.sh", tools, **variables)
    assert done.returncode == int(failed), done.stderr
    tests, alone, benchmark = asked.read_text().splitlines()
    assert tests.startswith(f"{bundle}: -m pytest -m gpu and not alone")
    assert alone.startswith(f"{bundle}: -m pytest -m gpu and alone")
    assert [" -n auto" in each for each in (tests, alone)] == [True, False]
    assert benchmark.startswith(f"{bundle}/benchmarks: -m gpubench --mib 64 --scratch ")
    assert benchmark.endswith(f"--results {out}")
    assert done.stdout.splitlines()[-4:] == [
        "tests:12 passed",
        "tests that run alone:12 passed",
        "memory used of each GPU: before GPU 0: one, after GPU 0: one",
        "benchmark: no row failed",
    ]
    assert "12 passed" in (out / "gpu-tests.log").read_text()
    assert (out / "gpu-bench.log").read_text() == "3 GB/s\n"
    asked.unlink()
    assert run(bundle / "run.sh", tools, "-k", "one", **variables).returncode == int(failed)
    assert len(asked.read_text().splitlines()) == 2, "named tests run without the benchmark"


def test_wheels_of_baselines_are_carried(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    wheels = [tmp_path / f"{name}-1-py3-none-any.whl" for name in ("deepnvme", "kvikio")]
    for wheel in wheels:
        wheel.write_bytes(b"wheel")
    gpu_bundle.make(folder, wheels[0], wheels[1:])
    assert (folder / "baselines" / wheels[1].name).read_bytes() == b"wheel"


def fake_driver() -> Path:
    """The library of the fake driver."""
    said = os.environ.get("DEEPNVME_FAKE_DRIVER")
    built = [gpu_bundle.ROOT / "target" / profile / "libdeepnvme_fake_driver.so" for profile in ("debug", "release")]
    for path in [Path(said)] if said else built:
        if path.is_file():
            return path
    pytest.fail("the fake driver has not been built: cargo build -p deepnvme-fake-driver")


def installed_wheel(folder: Path) -> Path:
    """Pack the installed package into a wheel again."""
    package = metadata.distribution("deepnvme")
    wheel = folder / f"deepnvme-{package.version}-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))
    return wheel


def test_a_rehearsal_of_the_whole_bundle(tmp_path: Path) -> None:
    """All files and calls of a run on a GPU, with the fake driver, a few tests and small sizes."""
    bundle, out = tmp_path / "bundle", tmp_path / "out"
    gpu_bundle.make(bundle, installed_wheel(tmp_path))
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "DEEPNVME_FAKE_DRIVER": str(fake_driver()),
        "PYTHON": sys.executable,
        "PYTEST_ADDOPTS": "-k test_fake_driver",
        "OUT": str(out),
        "TMPDIR": str(tmp_path),
    }
    # Installers write no compiled files, and each process would compile torch again.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables["PYTHONPYCACHEPREFIX"] = str(Path(sys.prefix) / "pycache")
    command = [str(bundle / "run.sh"), "--rehearse"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path}/tmp." in done.stdout, "the bundled wheel is imported"
    (path,) = out.glob("*-gpu.json")
    record = json.loads(path.read_text())
    assert {outcome["key"]: outcome["status"] for outcome in record["outcomes"]} == dict.fromkeys(
        ("read", "write", "load", "stream", "optimizer", "checkpoint", "timeline"), "passed"
    ), done.stdout
    assert record["is_rehearsal"]
    assert {file.name for file in out.iterdir()} >= {"gpu-tests.log", "gpu-tests.xml", "gpu-bench.log"}
    tests, *_, benchmark = done.stdout.splitlines()[-4:]
    assert tests.startswith("tests: ")
    assert "passed" in tests
    assert benchmark == "benchmark: no row failed"
