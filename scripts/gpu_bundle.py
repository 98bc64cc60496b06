"""Bundle the tests and the benchmark that need an NVIDIA GPU for another machine.

    python scripts/gpu_bundle.py [FOLDER]

`target/gpu-bundle` receives the release wheel, the tests, the benchmark, and `run.sh`, which runs them there. That
machine needs NVIDIA's driver and a python3 with torch, numpy, pytest and pip, and transformers for the row that streams
a model. FOLDER contains wheels of baselines, such as kvikio, which run.sh installs there. Nothing is downloaded.
Standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BYTES_MAX = 64 << 20
TESTS = Path("python", "tests")
BENCHMARKS = Path("benchmarks")
# The second contains the measuring code of the first.
BENCHMARKED = ("gpubench", "common")


def main() -> int:
    """Make the bundle, and print its size and how to use it."""
    wheels = sorted((ROOT / "target" / "wheels").glob("deepnvme-*.whl"))
    if len(wheels) != 1:
        print(f"gpu-bundle: {len(wheels)} wheels in target/wheels, expected one; run `make wheel`", file=sys.stderr)
        return 1
    folder = ROOT / "target" / "gpu-bundle"
    baselines = [wheel for given in sys.argv[1:] for wheel in sorted(Path(given).glob("*.whl"))]
    nbytes = make(folder, wheels[0], baselines)
    size = f"{folder.relative_to(ROOT)}: {nbytes / (1 << 20):.1f} MiB"
    if nbytes > BYTES_MAX:
        print(f"gpu-bundle: {size}; the limit is {BYTES_MAX >> 20} MiB", file=sys.stderr)
        return 1
    print(f"{size}, {sum(path.is_file() for path in folder.rglob('*'))} files")
    looked = subprocess.run([ROOT / "scripts" / "gpu_tests.sh", "--look"], capture_output=True, check=False)
    where = "here or there" if looked.returncode == 0 else "there"
    found = "" if looked.returncode == 0 else "There is no NVIDIA GPU here: "
    print(f"{found}copy the folder to a machine with an NVIDIA GPU, and run its run.sh {where}.")
    return 0


def make(folder: Path, wheel: Path, baselines: Sequence[Path] = ()) -> int:
    """Recreate the folder. Return its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    carried = ((each, Path("baselines", each.name)) for each in baselines)
    for source, target in (*contents(wheel), *carried):
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / target)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def contents(wheel: Path) -> Iterator[tuple[Path, Path]]:
    """List the files of the bundle: source and target."""
    yield wheel, Path(wheel.name)
    yield ROOT / "scripts" / "gpu_tests.sh", Path("run.sh")
    # With pytest's settings, since the folder becomes pytest's root.
    yield ROOT / "pyproject.toml", Path("pyproject.toml")
    for path in (
        TESTS / "conftest.py",
        TESTS / "shared" / "hang_watch.py",
        *sorted(path.relative_to(ROOT) for path in (ROOT / TESTS / "gpu").glob("*.py")),
        *(
            path.relative_to(ROOT)
            for package in BENCHMARKED
            for path in sorted((ROOT / BENCHMARKS / package).rglob("*.py"))
        ),
    ):
        yield ROOT / path, path


if __name__ == "__main__":
    sys.exit(main())
