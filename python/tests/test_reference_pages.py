"""The pages of docs/reference list everything that exists, with its defaults."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import deepnvme
import reference
import stubs
from deepnvme import errors

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
MODULES = ["deepnvme", "deepnvme.optim", "deepnvme.nn", "deepnvme.deepspeed"]
VARIABLE = re.compile(r"\bDEEPNVME_[A-Z_]*[A-Z]\b")
# Names that tests use for children of their own, and of an argument.
OF_ONE_TEST = re.compile(r"DEEPNVME_(X|TEST_(CHILD|FOLDER)\w*|MEM_TEST_CHILD)$")


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table below a heading, by the code of their first column."""
    text = (PAGES / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_has_its_cause_remedy_and_message(name: str) -> None:
    section = (PAGES / "errors.md").read_text().partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    assert "**Remedy:**" in section
    assert "```text\n" in section


def test_the_page_of_errors_has_no_others() -> None:
    found = re.findall(r"^## `(\w+)`$", (PAGES / "errors.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(errors.__all__)


def test_each_setting_of_an_engine_is_listed_with_its_default() -> None:
    listed = rows("settings.md", "Settings of an engine")
    arguments = inspect.signature(deepnvme.Engine).parameters
    assert list(listed) == list(arguments)
    for name, argument in arguments.items():
        if argument.default is not None:
            assert listed[name][0] == f"`{argument.default!r}`".replace("'", '"'), name


def test_the_keys_of_a_settings_file_are_the_settings(tmp_path: Path) -> None:
    source = (ROOT / "crates/deepnvme-io/src/config/mod.rs").read_text()
    config = source.partition("pub struct Config {")[2].partition("\n}")[0]
    assert re.findall(r"^    pub (\w+):", config, re.MULTILINE) == list(rows("settings.md", "Settings of an engine"))
    example = re.search(r"```toml\n(.*?)```", (PAGES / "settings.md").read_text(), re.DOTALL)
    assert example is not None
    file = tmp_path / "deepnvme.toml"
    file.write_text(example[1])
    assert deepnvme.Engine.from_file(file).queue_depth == 8


def test_the_defaults_of_calls_are_those_of_the_page() -> None:
    pytest.importorskip("torch")
    text = (PAGES / "settings.md").read_text()
    table = text.partition("\n## Settings of a call\n")[2].partition("\n## ")[0]
    found = 0
    for name, calls, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \| (`[^|]+`) \|", table, re.MULTILINE):
        for call in re.findall(r"`(\w+)`", calls):
            argument = inspect.signature(getattr(deepnvme, call, None) or deepnvme.open).parameters.get(name)
            if argument is not None:
                assert f"`{argument.default!r}`".replace("'", '"') == default, (call, name)
                found += 1
    assert found > 10


def test_each_environment_variable_is_listed() -> None:
    listed = set(VARIABLE.findall((PAGES / "environment.md").read_text()))
    command = ["git", "grep", "-hoE", r"\bDEEPNVME_[A-Z_]*[A-Z]\b", "--", "*.rs", "*.py", "*.sh", "Makefile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("this is no git checkout")
    used = {name for name in done.stdout.split() if not OF_ONE_TEST.match(name)} - {"DEEPNVME_X"}
    assert used == listed


@pytest.mark.parametrize(
    "module", [*MODULES, *(f"deepnvme.integrations.{name}" for name in dir(deepnvme.integrations))]
)
def test_each_public_object_is_on_a_page(module: str) -> None:
    pytest.importorskip("torch")
    try:
        names: list[str] = importlib.import_module(module).__all__
    except ImportError:
        pytest.skip(f"{module} needs a library that is not installed")
    text = "\n".join(page.read_text() for page in (PAGES / "python").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    plain = {"__version__", "errors", "optim", "LOAD_FORMAT", *errors.__all__}
    assert {f"{module}.{name}" for name in names if name not in plain} <= shown


def test_the_page_of_commands_is_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_the_stub_file_has_the_docstrings_of_the_extension(capsys: pytest.CaptureFixture[str]) -> None:
    assert stubs.main(["--check"]) == 0, capsys.readouterr().out


def test_the_stub_script_replaces_and_inserts_docstrings() -> None:
    class Module:
        class Kind:
            """New text."""

            def method(self) -> None:
                r"""Second \n text.

                More.
                """

        def plain(self) -> None:
            """One line."""

        def silent(self) -> None: ...

    stub = (
        'class Kind:\n    """Old."""\n    def method(self) -> None: ...\n\ndef plain() -> None:\n    """Old."""\n'
        "def silent(): ...\n"
    )
    made = stubs.with_docstrings(stub, Module)
    expected = (
        'class Kind:\n    """New text."""\n    def method(self) -> None:\n        r"""Second \\n text.\n\n'
        "        More.\n"
        '        """\n\ndef plain() -> None:\n    """One line."""\ndef silent(): ...\n'
    )
    assert made == expected
    assert stubs.with_docstrings(made, Module) == made


def test_the_rust_example_is_the_one_that_is_tested() -> None:
    source = (ROOT / "crates/deepnvme-file/src/lib.rs").read_text().partition("//! ```\n")[2].partition("//! ```")[0]
    tested = [line.removeprefix("//!").strip() for line in source.splitlines()]
    shown = (PAGES / "rust.md").read_text().partition("```rust\n")[2].partition("```")[0]
    assert [line for line in tested if line and not line.startswith("#") and line not in shown] == []


def test_each_schema_has_an_explanation() -> None:
    page: Any = (PAGES / "json-schemas.md").read_text()
    for schema in (PAGES / "schema").iterdir():
        assert f"(schema/{schema.name})" in page
