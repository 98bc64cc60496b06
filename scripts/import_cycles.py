"""Find import cycles between the files and folders of crates, the package and benchmarks. Standard library only.

    python scripts/import_cycles.py

Each output line but the last is one cycle: files that depend on each other, directly or indirectly, or neighbours in a
folder (files or sub-folders), each of which contains files that depend on the other. The last line is the number of
cycles. A mere re-export is not a dependency, nor is the module in a visibility. The tests inside a file belong to it:
they may use what the file may use. Exit status 1 if there is any cycle.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
TESTS = re.compile(r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*mod \w+ \{")
# In a module inside a file, the first `super` is the file.
SUPER = re.compile(r"(?<!::)\bsuper::(super::)?")
VISIBILITY = re.compile(r"\bpub\(in [^)]*\)")
USE = re.compile(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);")
LONG_PATH = re.compile(r"\b((?:crate|super)(?:::\w+)+)")
SHORT_PATH = re.compile(r"(?<![\w:])([a-z_]\w*)::(\w+)")

Module = tuple[str, ...]
Dependencies = Mapping[Module, set[Module]]


class Crate:
    """The modules of a crate that are files, and the paths that each of them uses."""

    def __init__(self, texts: dict[Module, str]) -> None:
        self._modules = set(texts)
        # The meaning of a name in a module that imports or re-exports it.
        self._names: dict[Module, dict[str, list[str]]] = defaultdict(dict)
        self._needed: dict[Module, list[list[str]]] = defaultdict(list)
        for module, text in texts.items():
            self._read_uses(module, text)
        for module, text in texts.items():
            self._read_body(module, VISIBILITY.sub("pub", USE.sub(" ", text)))

    def dependencies(self) -> Dependencies:
        """Return the files that each file depends on."""
        found: dict[Module, set[Module]] = defaultdict(set)
        for module, paths in self._needed.items():
            for path in paths:
                there = self._resolve(module, path)
                if there is not None and there != module:
                    found[module].add(there)
        return found

    def _read_uses(self, module: Module, text: str) -> None:
        for match in USE.finditer(text):
            for path in expanded(match[2]):
                self._names[module].setdefault(path[-1], path)
                if not match[1]:
                    self._needed[module].append(path)

    def _read_body(self, module: Module, body: str) -> None:
        self._needed[module] += [match[1].split("::") for match in LONG_PATH.finditer(body)]
        for match in SHORT_PATH.finditer(body):
            if (*module, match[1]) in self._modules:
                self._needed[module].append(["self", match[1], match[2]])
            elif match[1] in self._names[module]:
                self._needed[module].append([*self._names[module][match[1]], match[2]])

    def _resolve(
        self, module: Module, path: list[str], seen: frozenset[tuple[Module, str]] = frozenset()
    ) -> Module | None:
        """Find the file that defines a path's item; none for an item of another crate."""
        start = self._start(module, path)
        if start is None:
            return None
        at, rest = start
        while rest and (*at, rest[0]) in self._modules:
            at, rest = (*at, rest[0]), rest[1:]
        key = (at, rest[0]) if rest else (at, "")
        further = self._names[at].get(rest[0]) if rest else None
        if further is not None and key not in seen:
            there = self._resolve(at, [*further, *rest[1:]], seen | {key})
            if there is not None:
                return there
        return at if at in self._modules else None

    def _start(self, module: Module, path: list[str]) -> tuple[Module, list[str]] | None:
        """Return the module in which a path begins, and the rest of the path; none for a path into another crate."""
        if path[0] == "crate":
            return (), path[1:]
        if path[0] == "self":
            return module, path[1:]
        ups = next((index for index, name in enumerate(path) if name != "super"), len(path))
        if ups > 0:
            return (module[: len(module) - ups], path[ups:]) if ups <= len(module) else None
        is_here = (*module, path[0]) in self._modules
        return (module, path) if is_here else None


def expanded(tree: str) -> list[list[str]]:
    """Expand the tree of a ``use`` into paths."""
    tree = " ".join(tree.split())
    brace = tree.find("{")
    if brace < 0:
        path = [name.strip() for name in tree.partition(" as ")[0].split("::") if name.strip()]
        path = [name for name in path if name not in ("self", "*")] if path[0] != "self" else path
        return [path] if path else []
    head = tree[:brace]
    return [path for part in parts(tree[brace + 1 : tree.rfind("}")]) for path in expanded(head + part.strip())]


def parts(inner: str) -> Iterator[str]:
    """Split at commas outside of braces."""
    depth, begin = 0, 0
    for index, letter in enumerate(inner):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            yield inner[begin:index]
            begin = index + 1
    if inner[begin:].strip():
        yield inner[begin:]


def crate_texts(src: Path) -> dict[Module, str]:
    """Read the files of a crate without binaries, comments and string literals."""
    found = {}
    for path in sorted(src.rglob("*.rs")):
        names = list(path.relative_to(src).with_suffix("").parts)
        if names[0] == "bin":
            continue
        if names[-1] in ("mod", "lib", "main"):
            names.pop()
        text = COMMENT_OR_TEXT.sub(" ", path.read_text())
        tests = TESTS.search(text)
        end = tests.start() if tests else len(text)
        found[tuple(names)] = text[:end] + SUPER.sub(lambda path: path[1] or "self::", text[end:])
    return found


def python_dependencies(folder: Path) -> Dependencies:
    """Return the imports that run in the packages of a folder. Imports for type checkers only do not."""
    modules: dict[Module, Path] = {}
    for path in (path for package in folder.glob("*/__init__.py") for path in package.parent.rglob("*.py")):
        names = path.relative_to(folder).with_suffix("").parts
        modules[names[:-1] if names[-1] == "__init__" else names] = path
    found: dict[Module, set[Module]] = defaultdict(set)
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module[:-1]
        for name in imported(ast.parse(path.read_text()), package):
            there = tuple(name.split("."))
            there = there if there in modules else there[:-1]
            if there in modules and there != module:
                found[module].add(there)
    return found


def imported(node: ast.AST, package: Module = ()) -> Iterator[str]:
    """Yield the full names of a package's imports, also inside functions, except those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = package[: len(package) + 1 - child.level] if child.level else ()
            where = ".".join((*start, child.module) if child.module else start)
            yield from (f"{where}.{alias.name}" for alias in child.names)
        yield from imported(child, package)


def cycles(dependencies: Dependencies) -> list[list[Module]]:
    """Find the groups of files that reach each other."""
    reached = {module: reach(dependencies, module) for module in dependencies}
    groups = {
        tuple(sorted({module, *(other for other in there if module in reached.get(other, ()))}))
        for module, there in reached.items()
        if module in there
    }
    return [list(group) for group in sorted(groups)]


def folder_dependencies(dependencies: Dependencies) -> dict[Module, Dependencies]:
    """Return, for each folder, which of its files and sub-folders depend on each other through the files below them."""
    found: dict[Module, dict[Module, set[Module]]] = defaultdict(lambda: defaultdict(set))
    for module, others in dependencies.items():
        for other in others:
            depth = 0
            while module[depth : depth + 1] == other[depth : depth + 1] != ():
                depth += 1
            # A folder's own file (`mod.rs`) may use its sub-folders, and they it: the pass over files checks those.
            if depth < min(len(module), len(other)):
                found[module[:depth]][module[: depth + 1]].add(other[: depth + 1])
    return dict(found)


def reach(dependencies: Dependencies, module: Module) -> set[Module]:
    """Return all files that one depends on, directly or not."""
    found: set[Module] = set()
    left = list(dependencies.get(module, ()))
    while left:
        there = left.pop()
        if there not in found:
            found.add(there)
            left += dependencies.get(there, ())
    return found


def main() -> int:
    """Print all cycles. Exit status 1 if there is one."""
    count = 0
    sources = [*sorted((ROOT / "crates").rglob("src")), ROOT / "python" / "src"]
    packages = [(src.parent.name, Crate(crate_texts(src)).dependencies()) for src in sources]
    packages += [(name, python_dependencies(ROOT / name)) for name in ("python", "benchmarks")]
    for name, dependencies in packages:
        of_files = cycles(dependencies)
        of_folders = [cycle for inside in folder_dependencies(dependencies).values() for cycle in cycles(inside)]
        for cycle in of_files + [cycle for cycle in of_folders if cycle not in of_files]:
            count += 1
            print(f"{name}: {', '.join('/'.join(module) or 'lib' for module in cycle)}")
    print(f"import cycles: {count}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
