"""Check rules that no compiler checks. Standard library only.

    python scripts/tidy.py

Each finding is one line, `path:line: what is wrong`, or `Cargo.toml: what is wrong` for a dependency. Exit status 1 for
any finding except warnings. The rules: dependencies between crates, unsafe code only in certain folders and with a
SAFETY sentence that states why it is sound, module docs in every Rust file, names and metadata of files accessed in one
place only, threads started in one place only, workspace lints in every crate, file length, private paths, and relative
links in Markdown.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

LOWEST_LAYER = {"mem", "cuda", "format", "codec"}
# For a crate that is missing here, extend ARCHITECTURE.md first.
ALLOWED_DEPENDENCIES: dict[str, set[str]] = {
    "mem": set(),
    "cuda": set(),
    "format": set(),
    "codec": set(),
    "io": {"mem", "cuda"},
    "file": {"io", "format"},
    "checkpoint": {"file", "io", "format"},
    "rows": {"file", "io", "codec"},
    "swap": {"file", "io"},
    "optim": {"mem", "codec"},
    "perf": {"file", "io"},
    "settings": {"io"},
    "stream": {"checkpoint", "rows", "file", "io", "format", "codec"},
    "trace": {"file", "io"},
    "cli": {"file", "io", "format", "codec", "perf", "settings", "checkpoint", "rows", "stream"},
    "python": LOWEST_LAYER
    | {"io", "file", "checkpoint", "rows", "swap", "optim", "stream", "trace", "settings", "cli"},
    "testkit": {"io", "mem"},
    "fake-driver": set(),
    "simulation": {
        "io",
        "file",
        "mem",
        "format",
        "checkpoint",
        "rows",
        "swap",
        "stream",
        "testkit",
        "simulation-runtime",
    },
    "simulation-runtime": set(),
}
FOR_TESTS_ONLY = {"testkit", "fake-driver"}
# Replaces std in crates that are compiled for the simulation.
FOR_SIMULATION_ONLY = ("simulation-runtime", "cfg(simulated)")

UNSAFE_ALLOWED_IN = (
    "crates/deepnvme-mem/*",
    "crates/deepnvme-cuda/*",
    "crates/deepnvme-io/src/backend/*",
    "crates/deepnvme-io/src/gpu/*",
    "crates/*/tests/*",
    "crates/deepnvme-testkit/fake_driver/*",
    "python/src/memory/*",
    "python/src/optim/mod.rs",  # turns tensors into slices
    "python/src/optim/tensors.rs",  # turns tensors into slices
)
# Files that other programs read back: a name that is not UTF-8 is refused there.
EXACT_PATHS = (
    "crates/deepnvme-file/src/replace/set/record.rs",
    "crates/deepnvme-file/src/stripe_set.rs",
    "crates/deepnvme-settings/src/lib.rs",
)
SERIALISED_STRUCT = re.compile(
    r"#\[derive\([^)]*\bSerialize\b[^)]*\)\][^{;]*\bstruct\b[^{;]*\{.*?^\}", re.MULTILINE | re.DOTALL
)
SERIALISED_PATH = re.compile(r"\s*(?:pub(?:\([a-z]+\))? )?\w+: .*\bPath(?:Buf)?\b")
UNSAFE = re.compile(r"\bunsafe\s*(?:\{|impl\b|\(|(?:extern\s+)?fn\s+\w|extern\s*\{)")
# Sentences that leave the proof to another place. They should state the invariant, and the code that upholds it.
VAGUE_SAFETY = re.compile(
    r"\bguaranteed by the caller|caller\S* guarantee|\bas (?:above|below|before)\b|\bas in `", re.IGNORECASE
)
COMMENT_OR_STRING = re.compile(r'//.*|"(?:\\.|[^"\\])*"')
# Crates that access the file system through `deepnvme_io::fs` only, and the folders that implement it.
FILE_SYSTEM_USERS = (
    "crates/deepnvme-io/src/",
    "crates/deepnvme-file/src/",
    "crates/deepnvme-checkpoint/src/",
    "crates/deepnvme-rows/src/",
    "crates/deepnvme-swap/src/",
    "crates/deepnvme-stream/src/",
)
FILE_SYSTEM_IMPLEMENTATIONS = (
    "crates/deepnvme-io/src/fs/",
    "crates/deepnvme-io/src/backend/",
    "crates/deepnvme-io/src/free_space.rs",  # errors use it, and `fs` uses errors
)
FILE_SYSTEM_CALL = re.compile(
    r"\b(?:std|rustix|unix)::fs\b|\bfile_type\(\)|\.(?:exists|is_dir|is_file|is_symlink|metadata|read_dir|read_link|canonicalize)\(\)"
)
# Only `start_thread` starts threads, since it reports why a thread cannot start. Crates below it have their own places.
THREADS_STARTED_IN = (
    "crates/deepnvme-io/src/start.rs",
    "crates/deepnvme-optim/src/thread_pool.rs",
    "crates/deepnvme-cuda/src/cufile/open.rs",
)
THREAD_USERS = re.compile(r"(?:python|crates/deepnvme-(?!simulation|testkit)[a-z]+)/src/(?!.*tests\.rs$)")
THREAD_START = re.compile(r"\.spawn(?:_scoped)?\([^)\s]|\bthread::spawn\(")
THREAD_PANICS = re.compile(r"\b(?:thread::|scope\.)spawn\(")
# A longer file may hold a second idea; one far longer does.
LONG_LINES, TOO_LONG_LINES = 500, 700
# Folders that exist on one machine only.
PRIVATE_PATH = re.compile(r"(?<![\w.~$})-])/(?:home|root|Users|work|tmp/\w)/")
# Pages that links may lead to before they exist.
PENDING = ROOT / "docs" / "reference" / "pending.txt"
LINK = re.compile(r"\]\(<?([^)#\s>]+)(?:#[^)\s]*)?>?\)")


def main() -> int:
    """Check the whole tree. Print warnings, then findings."""
    files = [path for path in tracked_files() if (ROOT / path).is_file()]
    findings = list(check_dependencies(cargo_packages()))
    warnings: list[str] = []
    for path in files:
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # pictures and other data
        findings += check_file(path, text)
        warnings += check_length(path, text)
    findings += [finding for finding in warnings if finding.endswith("(failure)")]
    for line in [f"warning: {line}" for line in warnings if line not in findings] + findings:
        print(line)
    print(f"tidy: {len(files)} files, {len(findings)} findings")
    return 1 if findings else 0


def check_file(path: str, text: str) -> Iterator[str]:
    """Apply all rules for a single file."""
    yield from check_private_paths(path, text)
    if path.endswith(".rs"):
        yield from check_module_docs(path, text)
        yield from check_unsafe(path, text)
        yield from check_file_system(path, text)
        yield from check_threads(path, text)
        yield from check_serialised_paths(path, text)
    elif path.endswith(".md"):
        yield from check_links(path, text)
    elif path.endswith("/Cargo.toml"):
        yield from check_lints(path, text)


def check_dependencies(packages: list[dict[str, object]]) -> Iterator[str]:
    """Check dependencies between our own crates, as `cargo metadata` lists them."""
    for package in packages:
        name = short_name(package["name"])
        if name not in ALLOWED_DEPENDENCIES:
            yield f"Cargo.toml: crate {name} is missing from the dependency table in scripts/tidy.py"
            continue
        dependencies = package["dependencies"]
        assert isinstance(dependencies, list)
        for dependency in dependencies:
            target = short_name(dependency["name"])
            if dependency.get("path") is None or target == name:
                continue
            if dependency["kind"] == "dev" and target in FOR_TESTS_ONLY | ALLOWED_DEPENDENCIES[name]:
                continue
            if dependency["kind"] is None and (target, dependency.get("target")) == FOR_SIMULATION_ONLY:
                continue
            if dependency["kind"] == "dev" or target not in ALLOWED_DEPENDENCIES[name]:
                yield f"Cargo.toml: {name} -> {target} ({dependency['kind'] or 'normal'}) is not an allowed dependency"


def check_threads(path: str, text: str) -> Iterator[str]:
    """Refuse thread starts whose failure is a panic, or an error without a remedy."""
    if not THREAD_USERS.match(path):
        return
    lines = re.split(r"#\[cfg\((?:all\()?test\b", text)[0].splitlines()
    for index, line in enumerate(lines):
        code = COMMENT_OR_STRING.sub("", line)
        is_pool = path.endswith("optim/src/thread_pool.rs") and "pool.scope" in code
        if THREAD_PANICS.search(code) and not is_pool:
            yield f"{path}:{index + 1}: panics if no thread can be started; use `start_thread`"
            continue
        is_told = "start_thread" in "".join(lines[max(index - 2, 0) : index + 1])
        if THREAD_START.search(code) and path not in THREADS_STARTED_IN and not is_told:
            yield f"{path}:{index + 1}: starts a thread without `start_thread`, which reports why it cannot"


def check_serialised_paths(path: str, text: str) -> Iterator[str]:
    """Every path in JSON has a serialiser that takes any bytes. serde's own fails for names that are not UTF-8."""
    if path in EXACT_PATHS:
        return
    for struct in SERIALISED_STRUCT.finditer(text):
        first = text.count("\n", 0, struct.start()) + 1
        lines = struct[0].splitlines()
        for index, line in enumerate(lines):
            if SERIALISED_PATH.match(line) and not any("serialize_with" in above for above in lines[index - 1 : index]):
                yield f"{path}:{first + index}: a path in JSON needs `serialize_with` of `deepnvme_io::display`"


def check_lints(path: str, text: str) -> Iterator[str]:
    """Check that every crate uses the workspace's lints."""
    if not re.search(r"^\[lints\]\s*\nworkspace = true", text, re.MULTILINE):
        yield f"{path}:1: lacks `[lints] workspace = true`"


def check_module_docs(path: str, text: str) -> Iterator[str]:
    """Check that a Rust file begins with module docs."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#!")]
    if not lines or not lines[0].startswith("//!"):
        yield f"{path}:1: lacks module docs (`//!`) at its top"


def check_unsafe(path: str, text: str) -> Iterator[str]:
    """Check the folders of unsafe code, and its SAFETY sentences."""
    allowed = any(PurePosixPath(path).match(folder) or lies_below(path, folder) for folder in UNSAFE_ALLOWED_IN)
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if not UNSAFE.search(COMMENT_OR_STRING.sub("", line)):
            continue
        if not allowed:
            yield f"{path}:{index + 1}: unsafe code outside of UNSAFE_ALLOWED_IN (scripts/tidy.py)"
        elif not has_safety_note(lines, index):
            yield f"{path}:{index + 1}: unsafe code without a SAFETY sentence"
    for index, line in enumerate(lines):
        if "// SAFETY:" in line and VAGUE_SAFETY.search(comment_from(lines, index)):
            yield f"{path}:{index + 1}: a SAFETY sentence names no invariant; state it, and the code that upholds it"


def check_file_system(path: str, text: str) -> Iterator[str]:
    """Check that names and metadata of files are accessed in one place, so that tests can replace it."""
    is_test = "/tests/" in path or path.endswith(("tests.rs", "_tests.rs"))
    if is_test or not path.startswith(FILE_SYSTEM_USERS) or path.startswith(FILE_SYSTEM_IMPLEMENTATIONS):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#[cfg(test)]"):
            return
        if FILE_SYSTEM_CALL.search(COMMENT_OR_STRING.sub("", line)):
            yield f"{path}:{number}: asks the file system past deepnvme_io::fs"


def has_safety_note(lines: list[str], index: int) -> bool:
    """Whether the sentence is on the line itself or above it in the same paragraph."""
    start = index
    while start > 0 and lines[start - 1].strip():
        start -= 1
    return any("SAFETY:" in line or "# Safety" in line for line in lines[start : index + 1])


def comment_from(lines: list[str], index: int) -> str:
    """Return the text of a comment that begins on a line."""
    end = index + 1
    while end < len(lines) and lines[end].strip().startswith("//"):
        end += 1
    return " ".join(line.strip().lstrip("/ ") for line in lines[index:end])


def lies_below(path: str, pattern: str) -> bool:
    """Whether `path` is at any depth below the folder of a pattern `folder/*`."""
    parts, folder = path.split("/"), pattern.removesuffix("/*").split("/")
    if not pattern.endswith("/*") or len(parts) <= len(folder):
        return False
    return all(want in ("*", part) for want, part in zip(folder, parts, strict=False))


def check_length(path: str, text: str) -> Iterator[str]:
    """Check file length: long files are warnings, very long ones failures."""
    count = text.count("\n")
    # The stub file (.pyi) is left out: most of its lines are docstrings that a script writes.
    if path.endswith((".rs", ".py")) and count > LONG_LINES:
        end = " (failure)" if count > TOO_LONG_LINES else ""
        yield f"{path}:1: {count} lines, of at most {TOO_LONG_LINES if end else LONG_LINES}{end}"


def check_private_paths(path: str, text: str) -> Iterator[str]:
    """Refuse paths of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := PRIVATE_PATH.search(line):
            yield f"{path}:{number}: private path {found[0]}"


def check_links(path: str, text: str) -> Iterator[str]:
    """Check that relative links lead to existing files."""
    for number, line in enumerate(text.splitlines(), 1):
        for target in LINK.findall(line):
            leads_to = (ROOT / path).parent.joinpath(target)
            if not re.match(r"[a-z]+:", target) and not leads_to.exists() and not is_pending(leads_to):
                yield f"{path}:{number}: broken link {target}"


def is_pending(page: Path) -> bool:
    """Whether the documentation lists a page as one that does not exist yet."""
    lines = PENDING.read_text().splitlines() if PENDING.exists() else []
    return page.resolve() in {ROOT / "docs" / line.split()[0] for line in lines if line and not line.startswith("#")}


def short_name(name: object) -> str:
    """Return the short name: `deepnvme-io` is `io`."""
    return str(name).removeprefix("deepnvme-")


def cargo_packages() -> list[dict[str, object]]:
    """Return the crates of the workspace, as cargo lists them."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    described = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    packages: list[dict[str, object]] = json.loads(described)["packages"]
    return packages


def tracked_files() -> list[str]:
    """Return the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    return sorted(set(filter(None, listed.decode().split("\0"))))


if __name__ == "__main__":
    sys.exit(main())
