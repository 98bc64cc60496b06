"""Count the tests in the output of cargo and pytest. Standard library only.

A Rust test that cannot run here writes `skipped: TEST: reason` to stderr past the harness, and is moved from passed to
skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CARGO_RESULT = re.compile(r"test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored;")
CARGO_SKIP = re.compile(r"^(?:test .* \.\.\. )?skipped: ([\w:]+?): ")
PYTEST_RESULT = re.compile(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b")


@dataclass(frozen=True)
class Count:
    """Test counts of one suite, or of all."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_cargo(lines: list[str]) -> Count:
    """Add up the `test result:` lines of all test binaries. Tests that report a skip do not count as passed."""
    total, skipped = Count(), set()
    for line in lines:
        if found := CARGO_SKIP.match(line):
            skipped.add(found[1])  # some say so several times
        elif found := CARGO_RESULT.search(line):
            passed, failed, ignored = map(int, found.groups())
            total += Count(passed - len(skipped), failed, ignored + len(skipped))
            skipped.clear()
    return total


def count_pytest(lines: list[str]) -> Count:
    """Read the last summary line. Errors count as failed, expected failures as skipped."""
    for line in reversed(lines):
        if found := PYTEST_RESULT.match(line):
            words = {word: int(number) for number, word in (part.split() for part in found[1].split(", "))}
            failed = sum(words.get(word, 0) for word in ("failed", "error", "errors"))
            return Count(words.get("passed", 0), failed, words.get("skipped", 0) + words.get("xfailed", 0))
    return Count()
