"""Tests of the search for import cycles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import import_cycles as script
from import_cycles import (
    Crate,
    crate_texts,
    cycles,
    expanded,
    folder_dependencies,
    imported,
    python_dependencies,
)


def test_a_use_is_taken_apart() -> None:
    assert expanded("crate::{a::{B, self}, c as d, e::*}") == [
        ["crate", "a", "B"],
        ["crate", "a"],
        ["crate", "c"],
        ["crate", "e"],
    ]


def test_files_that_need_each_other() -> None:
    texts = {
        (): "mod a; mod b; mod c; pub use a::One;",
        ("a",): "use crate::b::Two; pub struct One;",
        ("b",): "pub struct Two; fn f() { crate::One::new() }",
        ("c",): "use super::a::One; use std::fmt;",
        ("d",): "mod e; pub use e::Four;",
        ("d", "e"): "pub struct Four;",
    }
    assert cycles(Crate(texts).dependencies()) == [[("a",), ("b",)]]


def test_a_parent_that_its_child_needs() -> None:
    texts = {(): "", ("a",): "mod b; use b::Small; struct Large;", ("a", "b"): "use super::Large; pub struct Small;"}
    assert cycles(Crate(texts).dependencies()) == [[("a",), ("a", "b")]]


def test_folders_that_need_each_other_though_no_files_do() -> None:
    texts = {
        (): "mod a; mod b;",
        ("a",): "mod one; mod two;",
        ("a", "one"): "use crate::b::Three; pub struct One;",
        ("a", "two"): "pub struct Two;",
        ("b",): "use crate::a::two::Two; pub struct Three;",
    }
    dependencies = Crate(texts).dependencies()
    assert cycles(dependencies) == []
    assert cycles(folder_dependencies(dependencies)[()]) == [[("a",), ("b",)]]


def test_a_folder_that_its_own_file_uses() -> None:
    texts = {(): "mod a;", ("a",): "mod b; use b::c::C;", ("a", "b"): "mod c; mod d;", ("a", "b", "c"): "pub struct C;"}
    texts["a", "b", "d"] = "use super::c::C;"
    dependencies = Crate(texts).dependencies()
    assert [cycles(inside) for inside in folder_dependencies(dependencies).values()] == [[]]


def test_where_something_is_visible_is_no_need() -> None:
    texts = {
        (): "mod a;",
        ("a",): "mod b; use b::One; struct Large;",
        ("a", "b"): "pub(in crate::a) use crate::a::Large as L; pub(in crate::a) struct One;",
    }
    assert cycles(Crate(texts).dependencies()) == []


def test_imports_for_type_checkers_do_not_count() -> None:
    text = "from a import b\nif TYPE_CHECKING:\n    import c\ndef f():\n    import d.e\n"
    assert list(imported(ast.parse(text))) == ["a.b", "d.e"]


def test_relative_imports_begin_at_the_package() -> None:
    text = "from . import a\nfrom .b import c\nfrom ..d import e\n"
    assert list(imported(ast.parse(text), ("x", "y"))) == ["x.y.a", "x.y.b.c", "x.d.e"]


def test_imports_of_tests_inside_a_file_count(tmp_path: Path) -> None:
    tests = "#[cfg(test)]\nmod tests { use super::*; use super::super::two::Two; }"
    (tmp_path / "lib.rs").write_text("mod one; mod two;")
    (tmp_path / "one.rs").write_text(f"pub struct One;\n{tests}")
    (tmp_path / "two.rs").write_text("use crate::one::One; pub struct Two;")
    assert cycles(Crate(crate_texts(tmp_path)).dependencies()) == [[("one",), ("two",)]]


def test_packages_of_a_folder_that_need_each_other(tmp_path: Path) -> None:
    for package, text in {"one": "import two.data", "two": "", "three": "from one import load"}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "two" / "data.py").write_text("def read():\n    from one import load\n")
    assert cycles(python_dependencies(tmp_path)) == [[("one",), ("two", "data")]]


@pytest.mark.parametrize(("needs", "status"), [("", 0), ("use super::one::One;", 1)])
def test_a_cycle_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], needs: str, status: int
) -> None:
    src = tmp_path / "crates" / "some" / "src"
    src.mkdir(parents=True)
    (src / "lib.rs").write_text("mod one; mod two;")
    (src / "one.rs").write_text("use crate::two::Two; pub struct One;")
    (src / "two.rs").write_text(f"{needs} pub struct Two;")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main() == status
    assert f"import cycles: {status}" in capsys.readouterr().out
