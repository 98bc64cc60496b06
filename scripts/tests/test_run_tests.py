"""Tests of the test counter: its parsers, and that a broken run never looks like a good one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import run_tests
from run_tests import Ended, Suite, checked_count, run
from suite_counts import Count, count_cargo, count_pytest

CARGO = """\
     Running unittests src/lib.rs (target/debug/deps/deepnvme_io-1)
test a ... ok
skipped: mounts::a_full_disk: no loop devices here
skipped: mounts::a_full_disk: no loop devices here
test b ... skipped: b: not root
ok
test result: ok. 7 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s
   Doc-tests deepnvme_io
test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.01s
"""


def test_cargo_sums_binaries_and_counts_printed_skips_as_skipped() -> None:
    assert count_cargo(CARGO.splitlines()) == Count(8, 1, 4)


@pytest.mark.parametrize(
    ("summary", "count"),
    [
        ("=== 12 passed, 1 skipped in 3.20s ===", Count(12, 0, 1)),
        ("= 2 failed, 310 passed, 4 skipped, 1 xfailed, 3 warnings, 1 error in 61.02s (0:01:01) =", Count(310, 3, 5)),
        ("5 passed in 0.01s", Count(5)),
        ("==== no tests ran in 0.01s ====", Count()),
        ("Interrupted", Count()),
    ],
)
def test_pytest_summary(summary: str, count: Count) -> None:
    assert count_pytest(["collected 9 items", summary, ""]) == count


def suite(code: str, *arguments: object, name: str = "probe", after: str = "") -> Suite:
    return Suite(name, [sys.executable, "-c", code, *map(str, arguments)], count_cargo, after=after)


GOOD = "print('test result: ok. 2 passed; 0 failed; 0 ignored;', flush=True)"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (GOOD, Count(2)),
        (f"{GOOD}; raise SystemExit(101)", Count(2, 1)),
        (f"{GOOD}; import os; os.kill(os.getpid(), 11)", Count(2, 1)),
        ("print('compiled nothing')", Count(0, 1)),
        ("print('test result: FAILED. 2 passed; 5 failed; 0 ignored;'); raise SystemExit(1)", Count(2, 5)),
    ],
)
def test_a_suite_is_counted_by_its_lines_and_its_status(code: str, count: Count) -> None:
    assert checked_count(run(suite(code), print)) == count


def test_failures_under_a_good_status_are_refused() -> None:
    with pytest.raises(AssertionError):
        checked_count(Ended(suite(""), 0, ["test result: FAILED. 1 passed; 1 failed; 0 ignored;"], 0.0, 0.0))


def test_a_suite_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "SILENCE_S", 0.5)
    hanging = suite(f"{GOOD}; import time; print('waits', flush=True); time.sleep(60)")
    ended = run(hanging, print)
    assert checked_count(ended) == Count(2, 1)
    assert "waits" in ended.failures()[-1]


def test_failures_are_named_at_the_end() -> None:
    lines = ["test a::b ... ok", "test a::c ... FAILED", "thread 'a::c' (7) panicked at src/a.rs:1:2:", "left: 1"]
    assert Ended(suite(""), 101, lines, 0.0, 0.0).failures() == lines[1:3]
    lines = ["x.py::test_y FAILED", "FAILED x.py::test_y - assert 0", "= 1 failed in 0.1s ="]
    assert Ended(suite(""), 1, lines, 0.0, 0.0).failures() == lines[1:2]
    assert Ended(suite(""), 0, lines, 0.0, 0.0).failures() == []


MEET = """\
import sys, time
from pathlib import Path
mine, *others = map(Path, sys.argv[1:])
mine.touch()
while not all(other.exists() for other in others):
    time.sleep(0.01)
print("I am", mine.name, flush=True)
"""


def test_suites_run_in_parallel_and_are_shown_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    suites = [
        suite(MEET + GOOD, one, two, three, name="one"),
        suite(GOOD, name="two", after="four"),
        suite(MEET + GOOD, two, one, three, name="three"),
        suite(MEET + GOOD, three, one, two, name="four"),
    ]
    monkeypatch.setattr(run_tests, "TOTAL", tmp_path / "total.txt")
    monkeypatch.setattr(run_tests, "SUITES", suites)
    monkeypatch.setattr(run_tests, "SILENCE_S", 60)
    assert run_tests.main([]) == 0
    said = capsys.readouterr().out
    titles = [line.split(":")[0] for line in said.splitlines() if line.startswith("==")]
    assert titles == ["== one", "== two", "== three", "== four"]
    assert said.index("I am one") < said.index("== two") < said.index("== three") < said.index("I am two")
    assert said.index("I am two") < said.index("== four") < said.index("I am three")
    assert said.splitlines()[-1] == str(Count(8))


def test_a_suite_waits_for_the_one_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "left"
    writes = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(left)!r}).touch(); {GOOD}"
    reads = f"import pathlib; assert pathlib.Path({str(left)!r}).exists(); {GOOD}"
    monkeypatch.setattr(run_tests, "TOTAL", tmp_path / "total.txt")
    monkeypatch.setattr(run_tests, "SUITES", [suite(reads, name="reads", after="writes"), suite(writes, name="writes")])
    assert run_tests.main([]) == 0
    # By itself it has nothing to wait for.
    assert run_tests.main(["reads"]) == 0


def test_the_processor_time_of_a_suite_includes_its_children() -> None:
    child = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    ended = run(suite(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"), print)
    assert ended.cpu_s >= 0.3


@pytest.mark.parametrize(("code", "status"), [(GOOD, 0), (f"{GOOD}; raise SystemExit(1)", 1)])
def test_the_total_and_the_exit_status(
    code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = tmp_path / "total.txt"
    monkeypatch.setattr(run_tests, "TOTAL", total)
    monkeypatch.setattr(run_tests, "SUITES", [suite(code)])
    assert run_tests.main([]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == total.read_text().strip() == str(Count(2, status))


def test_a_name_selects_its_parts() -> None:
    names = [
        name for name in ("python", "python-stream", "rust") if run_tests.is_named(suite("", name=name), ["python"])
    ]
    assert names == ["python", "python-stream"]
    assert not run_tests.is_named(suite("", name="python"), ["python-stream"])
