"""Find words, sentence forms and broken lines in comments, docstrings and documents. Standard library only.

    python scripts/prose.py [PATH ...]

The rules are in docs/contributing/style.md. Without paths, it checks all Rust, Python and Markdown files that git
tracks. A finding ends with exit status 1.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BANNED = {
    r"\b[Bb]y way of\b": "through, with, over",
    r"\b[Ii]t is said\b": "name the speaker",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair",
    r"\b[Aa]s ever\b": "as usual, or nothing",
    r"\bwhose it is\b": "its owner",
    r"\b(?:gives?|has|have) the bits of\b": "the same bits as, bit for bit",
    r"\b[Ww]hoever\b": "the caller, a process",
    r", too(?=[.;:,)]|$)": "also, before the verb",
    r"(?:^|(?<=[.;:] ))(?:What|Who) (?:is|are|was|has|have|does|goes|comes|can|may|must|will)\b": "a noun",
    r"\bknobs?\b": "setting",
    r"\b[Bb]eside\b": "next to, in addition to, compared with, during",
    r"\b[Cc]ontestants?\b": "tool",
    r"\bbounce slots?\b": "bounce buffer",
    r"\b[Pp]age-locked\b": "pinned",
    # Names of other projects keep their spelling: dotted ones, and these.
    r"(?<![.\w])(?!\w*(?:[Ss]iz|ptimizer|okenizer|ensorizer|anitizer))\w+iz(?:e[ds]?|ers?|ing|ations?|able)\b": "-ise",
}
RULES = [(re.compile(pattern), instead) for pattern, instead in BANNED.items()]
RUST_COMMENT = re.compile(r"//[/!]?[ \t]?(.*)")
RUST_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"')
MARK = re.compile(r"\s*(?://[/!]?|#)?\s*")
CODE_IN_MARKDOWN = re.compile(r"`+[^`\n]+`+")
# A line that ends far too early stands between two others of its sentence, the first of which is about full.
BROKEN = re.compile(r"(?=.{1,20}$)[\w',;]+(?: [\w',;]+)?")
FULL_MIN = 90
SENTENCE_ENDS = (".", "!", "?")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    """Check the files, and print a line for each finding."""
    findings = [finding for path in paths(arguments) for finding in check(path, (ROOT / path).read_text())]
    print("\n".join([*findings, f"prose: {len(findings)} findings"]))
    return 1 if findings else 0


def paths(arguments: list[str]) -> Iterator[str]:
    """Yield the files to check, relative to the root."""
    command = ["git", "ls-files", "--", *(arguments or ["*.rs", "*.py", "*.pyi", "*.md"])]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        if Path(path).suffix in (".rs", ".py", ".pyi", ".md"):
            yield path


def check(path: str, text: str) -> Iterator[str]:
    """Yield the findings of one file."""
    suffix = Path(path).suffix
    prose = rust_prose(text) if suffix == ".rs" else markdown_prose(text) if suffix == ".md" else python_prose(text)
    lines = [*prose]
    for number, line in lines:
        for rule, instead in RULES:
            if found := rule.search(line):
                yield f"{path}:{number}: {found[0].strip()!r}: say {instead}"
    if suffix != ".md":
        yield from broken_lines(path, text, {number for number, _ in lines})


def broken_lines(path: str, text: str, numbers: set[int]) -> Iterator[str]:
    """Yield the lines of prose that end far too early in the middle of a sentence."""
    lines = text.splitlines()
    for number in sorted(numbers):
        if not {number - 1, number + 1} <= numbers:
            continue
        before, line, after = lines[number - 2 : number + 1]
        mark, words = split_mark(line)
        is_inside = split_mark(after)[0] == mark and split_mark(after)[1] and split_mark(before)[1]
        is_broken = BROKEN.fullmatch(words) is not None and len(before) >= FULL_MIN and ">>>" not in before
        if is_inside and is_broken and not before.endswith(SENTENCE_ENDS):
            yield f"{path}:{number}: {words!r}: wrap the sentence again"


def split_mark(line: str) -> tuple[str, str]:
    """Split a line into its indentation with the mark of a comment, and its words."""
    mark = MARK.match(line)
    end = mark.end() if mark else 0
    return line[:end], line[end:]


def rust_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a Rust file."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := RUST_COMMENT.search(RUST_TEXT.sub('""', line)):
            yield number, CODE_IN_MARKDOWN.sub("``", found[1])


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        docstring = first.value if isinstance(first, ast.Expr) else None
        if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str):
            for offset, line in enumerate(docstring.value.splitlines()):
                yield docstring.lineno + offset, CODE_IN_MARKDOWN.sub("``", line.strip())


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document, without its code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, CODE_IN_MARKDOWN.sub("``", line.strip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
