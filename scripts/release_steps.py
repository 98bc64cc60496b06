"""The steps of `release_check.py`. Each returns a note on what it found, or raises `Skipped` or `Failed`."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import release_facts as facts
import release_licences as licences
import release_paths as paths
import release_systems as systems

ROOT = Path(__file__).resolve().parent.parent
USE_WHEEL = ROOT / "scripts" / "use_wheel.py"
TOOLS_LIST = ROOT / "scripts" / "release_tools.txt"
RUST_TARGET = "{machine}-unknown-linux-gnu"
MANYLINUX = "manylinux_2_28"
OLDEST_PYTHON = "3.10"
NEWER_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Some of the tests that need no torch: torch under emulation would take hours.
EMULATED_TESTS = (
    "arguments",
    "await",
    "batch",
    "close",
    "engine",
    "errors",
    "file",
    "settings",
    "stats",
    "tensor_array",
    "transfer",
)
EMULATED_PACKAGES = ("numpy", "pytest>=8")
TAIL_LINES = 20


class Skipped(Exception):  # noqa: N818 (a result, not an error)
    """This machine cannot run the step."""


class Failed(Exception):  # noqa: N818 (a result, not an error)
    """The release has a fault."""


@dataclass
class Release:
    """The folders of a run, and the tag to release."""

    tag: str | None = None
    step: str = ""
    folder: Path = ROOT / "target" / "release-check"

    @property
    def dist(self) -> Path:
        """The folder of the files that would be published."""
        return self.folder / "dist"

    def begin(self, step: str) -> None:
        """Start a step, with an empty log."""
        self.step = step
        self.log.unlink(missing_ok=True)

    @property
    def log(self) -> Path:
        """The output of the step's commands."""
        return self.folder / f"{self.step}.log"

    def wheels(self) -> list[Path]:
        """Return the wheels that earlier steps built."""
        return self._built("*.whl", "wheel")

    def wheel(self, machine: str) -> Path:
        """Return the wheel for one machine."""
        return self._built(f"*_{machine}.whl", "wheel" if machine == "x86_64" else "aarch64-wheel")[0]

    def sdist(self) -> Path:
        """Return the source distribution."""
        return self._built("*.tar.gz", "sdist")[0]

    def tool(self, name: str) -> str:
        """Return the path of a tool, after installing all of them into their own environment."""
        venv = self.folder / "tools"
        stamp = venv / "installed.txt"
        if not stamp.exists() or stamp.read_text() != TOOLS_LIST.read_text():
            make_venv(self, Path(sys.executable), venv)
            if self.run([venv / "bin" / "pip", "install", "--requirement", TOOLS_LIST], is_fatal=False) != 0:
                raise Skipped("the tools of scripts/release_tools.txt could not be installed; is an index reachable?")
            shutil.copy(TOOLS_LIST, stamp)
        return str(venv / "bin" / name)

    def environment(self) -> dict[str, str]:
        """Return the environment of builds.

        The tools come first in PATH, since maturin looks for zig there. Builds have a target folder of their own:
        maturin stages the extension at one path in it, so a second build at the same time could end up in this wheel.
        No path of this machine gets into the extension.
        """
        programs = os.pathsep.join([str(self.folder / "tools" / "bin"), os.environ["PATH"]])
        own = {"CARGO_TARGET_DIR": str(self.folder / "cargo"), "PYO3_PYTHON": sys.executable, "PATH": programs}
        return {**os.environ, **own, "CARGO_ENCODED_RUSTFLAGS": paths.rustc_flags(ROOT)}

    def run(
        self,
        command: list[str | Path],
        *,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        is_fatal: bool = True,
    ) -> int:
        """Run a command, with its output in the step's log. A failure shows the log's end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            status = subprocess.run(
                command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        if status and is_fatal:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            where = self.log.relative_to(ROOT)
            raise Failed(f"{Path(command[0]).name} ended with {status}; the end of {where}:\n{tail}")
        return status

    def _built(self, pattern: str, step: str) -> list[Path]:
        found = sorted(self.dist.glob(pattern))
        if not found:
            raise Skipped(f"there is no {pattern} in {self.dist.relative_to(ROOT)}: the step `{step}` builds it")
        return found


def version(_: Release) -> str:
    """Compare Cargo.toml with CHANGELOG.md."""
    number, date = release_version()
    return f"{number}, {date}"


def tag(release: Release) -> str:
    """Compare the tag, and check the date and the addresses, which only a published release needs."""
    number, date = release_version()
    faults = facts.tag_faults(release.tag or f"v{number}", number, date, project().get("urls", {}))
    if release.tag is None:
        raise Skipped("no --tag; a tag would " + ("fail today: " + "; ".join(faults) if faults else "pass"))
    if faults:
        raise Failed("; ".join(faults))
    return release.tag


def wheel(release: Release) -> str:
    """Build the x86_64 wheel. Zig links it, against the symbols of the oldest glibc."""
    return build(release, "x86_64")


def aarch64_wheel(release: Release) -> str:
    """Build the aarch64 wheel on any machine: zig is the linker."""
    target = RUST_TARGET.format(machine="aarch64")
    command = ["rustc", "--print", "target-libdir", "--target", target]
    libraries = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not libraries or not any(Path(libraries).glob("libcore-*.rlib")):
        raise Skipped(f"the Rust target is not installed: rustup target add {target}")
    return build(release, "aarch64")


def build(release: Release, machine: str) -> str:
    """Build one wheel with maturin, which checks it against the manylinux policy.

    Then take the folders of this machine out of its SBOM, and add the licences of its crates.
    """
    for old in release.dist.glob(f"*_{machine}.whl"):
        old.unlink()
    command: list[str | Path] = [release.tool("maturin"), "build", "--release", "--locked", "--zig"]
    command += ["--target", RUST_TARGET.format(machine=machine), "--compatibility", MANYLINUX, "--out", release.dist]
    release.run(command, environment=release.environment())
    built = release.wheel(machine)
    paths.rewrite_sbom(built, ROOT)
    try:
        licences.add(built, paths.cargo_home())
    except ValueError as error:
        raise Failed(str(error)) from error
    number, python, platforms = facts.wheel_tags(built.name)
    if (number, python) != (release_version()[0], "cp310-abi3") or not any(MANYLINUX in name for name in platforms):
        raise Failed(f"unexpected tags: {built.name}")
    return f"{built.name}, {built.stat().st_size / (1 << 20):.1f} MiB"


def sdist(release: Release) -> str:
    """Build the source distribution, and look into it."""
    for old in release.dist.glob("*.tar.gz"):
        old.unlink()
    release.run([release.tool("maturin"), "sdist", "--out", release.dist], environment=release.environment())
    path = release.sdist()
    if (number := facts.sdist_version(path.name)) != release_version()[0]:
        raise Failed(f"{path.name} has version {number}")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    if lacking := facts.absent(facts.IN_SDIST, names):
        raise Failed(f"{path.name} lacks {', '.join(lacking)}")
    return f"{path.name}, {len(names)} files, {path.stat().st_size / (1 << 20):.1f} MiB"


def wheel_from_sdist(release: Release) -> str:
    """Build as pip does for a user without a wheel, and use the result."""
    path = release.sdist()
    with tempfile.TemporaryDirectory() as folder:
        command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir"]
        release.run([*command, "--wheel-dir", folder, path], cwd=Path(folder), environment=release.environment())
        (built,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(built) as archive:
            check_contents(built.name, archive)
        return f"{built.name}: {use(release, Path(sys.executable), built)}"


def symbols(release: Release) -> str:
    """Read each extension's needs from its ELF file."""
    if shutil.which("readelf") is None:
        raise Skipped("readelf is not installed; it comes with gcc")
    notes = []
    for path in release.wheels():
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
            extension = archive.extract("deepnvme/_deepnvme.abi3.so", folder)
            needs = facts.glibc_versions(readelf("--version-info", extension))
            libraries = facts.libraries(readelf("--dynamic", extension))
        if newer := facts.newer_than(needs):
            raise Failed(f"{path.name} needs {', '.join(newer)}; glibc 2.28 lacks them")
        if foreign := facts.foreign_libraries(libraries):
            raise Failed(f"{path.name} needs {', '.join(foreign)}, which a machine may lack")
        notes.append(f"{path.name} needs {facts.newest(needs)} and {', '.join(sorted(libraries))}")
    return "; ".join(notes)


def abi3(release: Release) -> str:
    """Compare each extension's Python symbols with the stable ABI."""
    notes = []
    for path in release.wheels():
        command = [release.tool("abi3audit"), "--report", "--assume-minimum-abi3", OLDEST_PYTHON, str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.stdout.startswith("{"):
            raise Failed(f"abi3audit ended with {report.returncode}: {report.stderr.strip()}")
        unstable = facts.unstable_symbols(report.stdout)
        if unexpected := unstable - facts.EXPORTED_SYMBOLS:
            raise Failed(f"{path.name} uses symbols outside the stable ABI: {', '.join(sorted(unexpected))}")
        notes.append(f"{path.name}, with {len(unstable)} of {len(facts.EXPORTED_SYMBOLS)} known exceptions")
    return "; ".join(notes)


def metadata(release: Release) -> str:
    """Have twine render the README and check the metadata of all files."""
    files = [*release.wheels(), release.sdist()]
    release.run([release.tool("twine"), "check", "--strict", *files])
    return f"{len(files)} files"


def contents(release: Release) -> str:
    """Look into each wheel, also for paths of this machine, and copy its SBOM out for an attestation."""
    notes = []
    for path in release.wheels():
        with zipfile.ZipFile(path) as archive:
            crates = check_contents(path.name, archive)
            if not any(name.endswith(f".dist-info/licenses/{licences.NAME}") for name in archive.namelist()):
                raise Failed(f"{path.name} lacks {licences.NAME}, the licences of its crates")
            if leaks := list(paths.leaks(archive, [*paths.machine_folders(ROOT), Path.home()])):
                raise Failed(
                    f"{path.name} contains paths of the machine that built it: {'; '.join(leaks[:TAIL_LINES])}"
                )
            (name,) = (name for name in archive.namelist() if name.endswith(".cyclonedx.json"))
            copy = release.folder / "sbom" / f"{path.stem}.cdx.json"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(archive.read(name))
        notes.append(f"{path.name}: {crates} crates in {copy.relative_to(ROOT)}")
    return "; ".join(notes)


def check_contents(name: str, archive: zipfile.ZipFile) -> int:
    """Check one wheel. Return the number of crates that its SBOM lists."""
    names = [entry for entry in archive.namelist() if not entry.endswith("/")]
    if lacking := facts.absent(facts.IN_WHEEL, names):
        raise Failed(f"{name} lacks {', '.join(lacking)}")
    if astray := facts.astray(names):
        raise Failed(f"{name} would install {', '.join(astray)}")
    (sbom,) = (entry for entry in names if entry.endswith(".cyclonedx.json"))
    text = archive.read(sbom).decode()
    locked = facts.locked_crates((ROOT / "Cargo.lock").read_text())
    if faults := list(facts.sbom_faults(text, release_version()[0], locked)):
        raise Failed(f"{name}: {'; '.join(faults)}")
    return text.count('"pkg:cargo/')


def install(release: Release) -> str:
    """Use the wheel with the Python that runs this script."""
    return use(release, Path(sys.executable), release.wheel("x86_64"))


def oldest_python(release: Release) -> str:
    """Use the wheel with the oldest supported Python."""
    path = release.wheel("x86_64")
    python = find_python(OLDEST_PYTHON)
    if python is None:
        raise Skipped(f"no Python {OLDEST_PYTHON} in PATH, in pyenv or in uv")
    return use(release, python, path)


def newer_pythons(release: Release) -> str:
    """Use the wheel with all other supported Pythons that are here."""
    path = release.wheel("x86_64")
    found = {number: find_python(number) for number in NEWER_PYTHONS}
    notes = [use(release, python, path) for python in found.values() if python]
    missing = [number for number, python in found.items() if python is None]
    if not notes:
        raise Skipped(f"no Python {' or '.join(missing)} in PATH, in pyenv or in uv")
    return "; ".join([*notes, *(f"no Python {number} here" for number in missing)])


def oldest_glibc(release: Release) -> str:
    """Use the wheel in a container with glibc 2.28."""
    path = release.wheel("x86_64")
    if obstacle := systems.docker_obstacle("linux/amd64"):
        raise Skipped(obstacle)
    program = f"pip install --quiet --no-index --no-deps /dist/{path.name} && python -I /project/scripts/use_wheel.py"
    return last_line(release, systems.in_container("linux/amd64", ROOT, release.dist, program))


def aarch64_tests(release: Release) -> str:
    """Run the tests of EMULATED_TESTS on aarch64, in a container or in a chroot. qemu emulates the CPU."""
    path = release.wheel("aarch64")
    without_docker = systems.docker_obstacle("linux/arm64")
    folder = folder_for_aarch64(release, without_docker) if without_docker else None
    files = " ".join(f"python/tests/test_{name}.py" for name in EMULATED_TESTS)
    # The tests must import the installed package, and pytest must not write into the project.
    program = (
        f"python -I /project/scripts/use_wheel.py && cd /project"
        f" && python -B -m pytest -p no:cacheprovider -o faulthandler_timeout=900 -q {files}"
    )
    packages = f"/dist/{path.name} {' '.join(map(repr, EMULATED_PACKAGES))}"
    if folder:
        venv = "PATH=/venv/bin:$PATH; python3 -m venv --clear /venv"
        install = f"pip install --no-index --find-links /packages {packages}"
        command = systems.in_chroot(folder, ROOT, release.dist, f"{venv}; {install}; {program}")
    else:
        command = systems.in_container("linux/arm64", ROOT, release.dist, f"pip install --quiet {packages}; {program}")
    others = len(list((ROOT / "python" / "tests").rglob("test_*.py"))) - len(EMULATED_TESTS)
    counts = last_line(release, command)
    return f"{counts}; not run: {others} other files, which need torch or more than user emulation offers"


def folder_for_aarch64(release: Release, without_docker: str) -> Path:
    """Prepare and return a folder with Debian for aarch64, and with the packages of the tests."""
    if obstacle := systems.chroot_obstacle():
        raise Skipped(f"{without_docker}; without it: {obstacle}")
    folder = release.folder / "aarch64"
    if not (folder / "unpacked.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if release.run(systems.fetch(folder), is_fatal=False) != 0:
            raise Skipped(f"{without_docker}; without it: debootstrap could not fetch Debian's packages")
        for command in systems.unpack(folder):
            release.run(command)
        (folder / "unpacked.txt").touch()
    probe = systems.in_chroot(folder, ROOT, release.dist, "test $(uname -m) = aarch64")
    if release.run(probe, is_fatal=False) != 0:
        raise Skipped(
            f"{without_docker}; without it: Linux 6.7 or later, with user namespaces that have binfmt handlers"
        )
    shutil.rmtree(folder / "packages", ignore_errors=True)
    fetch: list[str | Path] = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:"]
    fetch += ["--python-version", systems.SUITE_PYTHON, "--platform", f"{MANYLINUX}_aarch64"]
    fetch += ["--platform", "manylinux2014_aarch64", "--dest", folder / "packages"]
    release.run([*fetch, *EMULATED_PACKAGES])
    return folder


def use(release: Release, python: Path, path: Path) -> str:
    """Install a wheel into a new environment that has nothing else, and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        make_venv(release, python, venv)
        release.run([venv / "bin" / "pip", "install", "--no-index", "--no-deps", path])
        return last_line(release, [venv / "bin" / "python", "-I", USE_WHEEL], cwd=Path(folder))


def last_line(release: Release, command: list[str | Path], *, cwd: Path = ROOT) -> str:
    """Run a command, and return the last line of its output."""
    release.run(command, cwd=cwd)
    return release.log.read_text(errors="replace").splitlines()[-1]


def make_venv(release: Release, python: Path, venv: Path) -> None:
    """Create an environment."""
    release.run([python, "-m", "venv", "--clear", venv])


def find_python(number: str) -> Path | None:
    """Return an interpreter of that version, if one is installed."""
    candidates = [shutil.which(f"python{number}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(folder / "bin" / "python") for folder in sorted(pyenv.glob(f"{number}*"))]
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", "--no-python-downloads", number]
        candidates.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    return next((Path(path) for path in candidates if path and is_python(path, number)), None)


def is_python(path: str, number: str) -> bool:
    """Whether this interpreter starts, has ensurepip and that version. pyenv's shims also exist for other versions."""
    program = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        started = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return started.stdout.strip() == number


def readelf(what: str, path: str) -> str:
    """Return readelf's output for an ELF file."""
    command = ["readelf", "--wide", what, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


def release_version() -> tuple[str, str]:
    """Return the version of this tree, and its date in CHANGELOG.md."""
    number = facts.cargo_version((ROOT / "Cargo.toml").read_text())
    dates = facts.changelog_dates((ROOT / "CHANGELOG.md").read_text())
    if number not in dates:
        raise Failed(f"CHANGELOG.md has no section `## [{number}] - DATE`, only {', '.join(dates) or 'none'}")
    return number, dates[number]


def project() -> dict[str, dict[str, str]]:
    """Return the table `project` of pyproject.toml."""
    # The standard library has the parser from 3.11 on; on 3.10 use pip's copy.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    table: dict[str, dict[str, str]] = parser.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table
