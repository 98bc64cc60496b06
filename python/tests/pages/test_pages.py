"""Each fenced block of both READMEs and of the pages in `docs/` runs, or its page says why not: see `blocks`."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import deepnvme

from .blocks import (
    ELSEWHERE,
    SHELL,
    Block,
    PageError,
    Session,
    commands,
    is_elsewhere,
    read_page,
    run_here,
    run_process,
)

if TYPE_CHECKING:
    from forked_python import ForkedPython

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
READMES = (ROOT / "README.md", ROOT / "python/README.md")
PATHS = [path for path in (*READMES, *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
PAGES = {str(path.relative_to(ROOT)): read_page(path) for path in PATHS}
PROCESSES = [(name, process) for name, page in PAGES.items() for process in page.processes()]
# A block more is skipped: raise this only if its reason stands in the page.
SKIPPED_MAX = 9
# The header of the table of calls that replace others, and the first code of its second column.
HEADER = "| you have | you write |"
ROWS = re.compile(r"^\| [^|]+ \| `(deepnvme\.[^`]+)`", re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "process"), PROCESSES, ids=[":".join(each).rstrip(":") for each in PROCESSES])
def test_blocks_run(
    name: str, process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: ForkedPython
) -> None:
    page = PAGES[name]
    for needed in page.needs.get(process, []):
        if shutil.which(needed) is None and importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    monkeypatch.chdir(tmp_path)
    if process:
        run_process(page, process, tmp_path, forked)
    else:
        run_here(page)
    gc.collect()


def test_blocks_are_counted() -> None:
    fenced = [block for page in PAGES.values() for block in page.blocks if block.language != "setup"]
    skipped = [f"{block.place}: {block.skip}" for block in fenced if block.skip is not None]
    lines = [line for block in fenced if block.language in SHELL for line in commands(block)]
    elsewhere = [f"{line}: {ELSEWHERE[line.split()[0]]}" for line in lines if is_elsewhere(line)]
    sys.stdout.write(f"{len(fenced)} blocks, of which {len(skipped)} are skipped:\n")
    sys.stdout.write("\n".join([*skipped, "commands that run elsewhere:", *elsewhere]) + "\n")
    assert len(fenced) > 30
    assert len(skipped) <= SKIPPED_MAX


def names_of(block: Block) -> tuple[set[str], set[str]]:
    """Return the names that a block of Python defines, and those that it uses."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
    return defined, used


@pytest.mark.parametrize(("name", "process"), PROCESSES, ids=[":".join(each).rstrip(":") for each in PROCESSES])
def test_pasted_blocks_lack_no_name(name: str, process: str) -> None:
    """A set-up that readers do not see defines only names that a comment calls the reader's own."""
    hidden: set[str] = set()
    visible: set[str] = set()
    for block in PAGES[name].of(process):
        if block.language not in ("python", "setup"):
            continue
        defined, used = names_of(block)
        if block.language == "setup":
            hidden |= defined
            continue
        visible |= defined
        lacking = used & hidden - visible
        # Those of an earlier block are the reader's own in the later ones.
        assert not lacking or re.search(r"#.*\b(your|you have)\b", block.text), f"{block.place}: {sorted(lacking)}"
        visible |= lacking


@functools.cache
def options_of(command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "deepnvme", *command.split(), "--help"], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"--[a-z][\w-]*", done.stdout))


def test_options_exist() -> None:
    """Also those of blocks that are skipped."""
    for page in PAGES.values():
        for block in page.blocks:
            for line in commands(block) if block.language in SHELL else ():
                if found := re.match(r"deepnvme (rows [a-z]+|[a-z][\w-]*)", line):
                    assert set(re.findall(r" (--[a-z][\w-]*)", line)) <= options_of(found[1]), block.place


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_calls_that_replace_others_run(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    deepnvme.save(model.state_dict(), "model.safetensors")
    names = {"path": tmp_path / f"x.{suffix}", "folder": tmp_path, "obj": model.state_dict(), "name": "weight",
             "tensors": model.state_dict(), "model": model, "deepnvme": deepnvme}  # fmt: skip
    (table,) = [
        text.partition(HEADER)[2].partition("\n\n")[0] for path in PATHS if HEADER in (text := path.read_text())
    ]
    calls = ROWS.findall(table)
    assert len(calls) > 10
    for call in calls:
        eval(call.replace('"cuda"', '"meta"'), names)


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```\n",
        "```rust\nfn main() {}\n```\n",
        "<!-- skip -->\n```python\n1 / 0\n```\n",
        "<!-- skip: -->\n```python\n1 / 0\n```\n",
        "<!-- skip: a reason -->\nBut here is a sentence.\n\n```python\n1 / 0\n```\n",
        "<!-- skip: a reason -->\n",
        "<!-- process: other, quickly -->\n```python\n1 / 0\n```\n",
    ],
)
def test_a_wrong_page_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(PageError):
        read_page(path)


PAGE = """
<!-- setup
number = 1
-->

```python
number += 1
print("a line")
```

- A list:

  ```bash
  pip install deepnvme
  echo "shown" > file    # a comment
  cat file
  ```

<!-- skip: a reason -->
```python
1 / 0
```

<!-- process: other, needs json, ranks 2, twice -->
```python
import os
open(os.environ["RANK"], "a").write("x")
```

```json
{"a": 1}
```

<!-- setup
assert number == 2
assert printed().endswith("a line\\nshown\\n"), printed()
-->
"""


def test_a_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: ForkedPython) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    page = read_page(path)
    run_here(page)
    assert page.processes() == ["", "other"]
    assert page.needs == {"other": ["json"]}
    run_process(page, "other", tmp_path, forked)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["xx", "xx"]


@pytest.mark.parametrize(
    "block",
    ["```python\n1 / 0\n```", "```bash\nfalse\n```", "```json\n{a}\n```", "```toml\na\n```", "```console\nls\n```"],
)
def test_a_wrong_block_fails(block: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(block + "\n")
    session, page = Session(), read_page(path)
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError, PageError)):
        session.run(page.blocks[0], path)
