"""Write the reference page of the command line from the help of its commands.

python scripts/reference.py           # write docs/reference/cli.md
python scripts/reference.py --check   # exit status 1 if it would change
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/cli.md"
HEAD = """\
# Command line

`deepnvme` and `python -m deepnvme` are the same program, which the wheel installs. The Rust binary of `deepnvme-cli`
cannot run `demo`, `generate`, `stream-bench` and `rows`, which need the Python package with torch, and all but `rows`
transformers. Results go to standard output, messages to standard error. Exit status: 0 success, 1 failure, 2 usage
error.

[JSON schemas](json-schemas.md) describe the output of `--json`. [Settings](settings.md) explains the settings of the
engine, and the sizes that options accept.
"""
# `Commands:` of the help, up to the empty line behind it.
COMMANDS = re.compile(r"^Commands:\n(.*?)\n\n", re.MULTILINE | re.DOTALL)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = command_line()
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    if "--check" in arguments:
        print(f"{PAGE.relative_to(ROOT)} is not the help of the commands; run: python scripts/reference.py")
        return 1
    PAGE.write_text(page)
    return 0


def command_line() -> str:
    """Return the page: the help of the program, of each command, and of its commands."""
    sections = sections_of([])
    assert len(sections) > 1, "the help lists no commands"
    return HEAD + "".join(f"\n## `{title}`\n\n```text\n{text}\n```\n" for title, text in sections)


def sections_of(command: list[str]) -> list[tuple[str, str]]:
    """Return the titles and the texts of a command and of the commands below it."""
    text = help_of(command)
    found = COMMANDS.search(text)
    names = [line.split()[0] for line in found[1].splitlines() if line[:3].strip()] if found else []
    below = [section for name in names if name != "help" for section in sections_of([*command, name])]
    return [(" ".join(["deepnvme", *command]), text), *below]


def help_of(command: list[str]) -> str:
    """Return the help of a command, without blanks at the ends of lines."""
    # Another width, or colours, would change the page.
    plain = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "deepnvme", *command, "--help"], check=True, capture_output=True, text=True, env=plain
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
