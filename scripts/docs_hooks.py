"""Extend MkDocs for this project: included files, links out of the site, inline pictures.

`mkdocs.yml` lists this file under `hooks`. A page may contain a line `<!-- include: FILE -->`, relative to the root.
The file is inserted without its title, and its links are rewritten for the page. It also replaces the line just above:
that one links to the file for readers of the repository, where nothing is inserted. A link to a file that is not part
of the site becomes its text and the path, so that the site can be read without the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Files outside of docs/ -> the pages that include them.
PAGE_OF = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "DESIGN.md": "explanation/design.md",
    "CONTRIBUTING.md": "contributing/develop.md",
    "RELEASING.md": "contributing/release.md",
    "benchmarks/NOTES.md": "explanation/measurements.md",
    "README.md": "index.md",
}
INCLUDE = re.compile(r"^(?:\S.*\n)?<!-- include: (\S+) -->$", re.MULTILINE)
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"^!\[([^\]]*)\]\((\S*pictures/\w[\w-]*\.svg)\)$", re.MULTILINE)
FOREIGN = re.compile(
    r"""<(?:script|img|iframe)[^>]*src="?(https?:[^">\s]+)|<link[^>]*stylesheet[^>]*(https?:[^">\s]+)"""
)
# Comments for the tests that run the blocks of a page.
MARKER = re.compile(r"^<!-- *(?:setup|skip|process)\b.*?-->\n", re.MULTILINE | re.DOTALL)
# Only a picture by itself needs its style. Within a page, the theme sets the colour.
STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Expand a page before it is converted."""
    return expand(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads a script, picture, frame or style sheet from another host."""
    if found := FOREIGN.search(output):
        raise ValueError(f"{page.file.src_uri} loads {found[0]}: the site must be readable offline")
    return output


def expand(markdown: str, page: str) -> str:
    """Insert included files and pictures, and rewrite links. `page` is relative to docs/."""
    markdown = MARKER.sub("", markdown)
    folder = posixpath.dirname(f"docs/{page}")
    text = rewrite_links(PICTURE.sub(lambda found: inline(found[1], f"{folder}/{found[2]}"), markdown), folder, page)
    return INCLUDE.sub(lambda found: include(found[1], page), text)


def include(path: str, page: str) -> str:
    """Return a file of the repository as a part of a page."""
    text = (ROOT / path).read_text().partition("\n")[2].lstrip("\n")
    return rewrite_links(text, posixpath.dirname(path), page)


def inline(title: str, path: str) -> str:
    """Return a picture as HTML, so that its colours follow the theme."""
    picture = STYLE.sub("", (ROOT / posixpath.normpath(path)).read_text()).strip()
    return f"<figure>\n{picture}\n<figcaption>{title}</figcaption>\n</figure>"


def rewrite_links(text: str, folder: str, page: str) -> str:
    """Rewrite the links of a text that lies in `folder` for a page of the site. Code stays as it is."""

    def rewrite(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = PAGE_OF.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if inside:
            return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{anchor})"
        return label if f"`{path}`" == label else f"{label} (`{path}`)"

    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(rewrite, part) for index, part in enumerate(parts))
