"""Run the steps of a release on this machine, without publishing anything. Standard library only.

    python scripts/release_check.py [--tag v0.1.0] [--strict] [STEP ...]

Each step ends as done, skipped or failed, and says why. Without steps, all run. `--strict` counts a skipped step as
failed. The release workflow runs the same steps by name. Wheels, tools and logs are in target/release-check. Exit
status: 0 no step failed, 1 a step failed, 2 usage error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable

import release_steps as steps
from release_steps import Failed, Release, Skipped

# In this order: later steps use the files of earlier ones.
STEPS: dict[str, tuple[Callable[[Release], str], str]] = {
    "version": (steps.version, "Cargo.toml and CHANGELOG.md agree"),
    "tag": (steps.tag, "the tag, the date and the addresses of the release are set"),
    "wheel": (steps.wheel, "build the x86_64 wheel for glibc 2.28"),
    "aarch64-wheel": (steps.aarch64_wheel, "build the aarch64 wheel"),
    "sdist": (steps.sdist, "build the source distribution"),
    "wheel-from-sdist": (steps.wheel_from_sdist, "build a wheel from it in an empty folder, and use that"),
    "symbols": (steps.symbols, "the wheels need no newer glibc than 2.28 and no foreign library"),
    "abi3": (steps.abi3, "the wheels use the stable ABI of Python 3.10, and nothing else but known exceptions"),
    "metadata": (steps.metadata, "an index accepts the metadata"),
    "contents": (steps.contents, "licences, stubs, py.typed and SBOM are in, and no path of this machine"),
    "install": (steps.install, "install into an empty environment and use it"),
    "oldest-python": (steps.oldest_python, "the same with Python 3.10"),
    "newer-pythons": (steps.newer_pythons, "the same with each newer Python that is installed"),
    "oldest-glibc": (steps.oldest_glibc, "the same on glibc 2.28, in a container"),
    "aarch64-tests": (steps.aarch64_tests, "test the aarch64 wheel under emulation"),
}


def main(arguments: list[str]) -> int:
    """Run the steps, then print the summary."""
    parser = argparse.ArgumentParser(description="Run the steps of a release, without publishing anything.")
    parser.add_argument("--tag", help="the tag to release; without it, the step `tag` is skipped")
    parser.add_argument("--strict", action="store_true", help="count skipped steps as failed")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one of {', '.join(STEPS)}; all by default")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.steps if name not in STEPS]:
        parser.error(f"unknown steps: {', '.join(unknown)}")
    release = Release(tag=chosen.tag)
    if not chosen.steps:
        shutil.rmtree(release.dist, ignore_errors=True)
    results = {name: run(name, release) for name in STEPS if name in (chosen.steps or STEPS)}
    print(summary(results))
    return exit_status(results, is_strict=chosen.strict)


def run(name: str, release: Release) -> str:
    """Run one step, and print its result."""
    function, purpose = STEPS[name]
    print(f"{name}: {purpose}", flush=True)
    began = time.monotonic()
    release.begin(name)
    try:
        result, why = "done", function(release)
    except Skipped as reason:
        result, why = "skipped", str(reason)
    except Failed as reason:
        result, why = "failed", str(reason)
    print(f"    {result} ({time.monotonic() - began:.0f} s): {why}", flush=True)
    return result


def summary(results: dict[str, str]) -> str:
    """Return the counts, and the names of the steps that were not done."""
    named = {result: [name for name in results if results[name] == result] for result in ("done", "skipped", "failed")}
    lines = [f"{result}: {', '.join(names)}" for result, names in named.items() if names and result != "done"]
    counts = [f"{len(names)} {result}" for result, names in named.items()]
    return "\n".join([*lines, f"release-check: {', '.join(counts)}"])


def exit_status(results: dict[str, str], *, is_strict: bool) -> int:
    """Return 1 if a step failed, or was skipped under `--strict`."""
    bad = {"failed", "skipped"} if is_strict else {"failed"}
    return 1 if bad & set(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
