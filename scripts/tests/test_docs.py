"""Pictures, hooks of the site, and links of the README."""

from __future__ import annotations

import re
from pathlib import Path

import docs_hooks
import pictures

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 120


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    text = docs_hooks.FENCE.sub("", page.read_text())
    text = docs_hooks.INCLUDE.sub(lambda found: (ROOT / found[1]).read_text(), text)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_links_of_the_readme_lead_somewhere() -> None:
    links = docs_hooks.LINK.findall((ROOT / "README.md").read_text())
    assert len(links) > 10
    for label, target, anchor in links:
        if re.match(r"[a-z]+:", target):
            continue
        page = ROOT / target
        assert page.exists(), f"{label}: {target}"
        if anchor:
            assert anchor[1:] in anchors(page), f"{label}: {target}{anchor}"


def test_the_readme_is_short_and_names_the_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= LINES_MAX
    assert "`make demo`" in text
    assert "`make test`" in text


def test_pages_have_the_title_of_their_entry_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    entries = re.findall(r"- ([^:\n]+): ((?:how-to|tutorials)/\S+\.md)$", text, re.MULTILINE)
    assert len(entries) > 20
    for entry, page in entries:
        title = re.search(r"^# (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert title is not None
        assert title[1].replace("`", "") == entry


def test_pictures_are_those_of_the_script() -> None:
    for name, draw in pictures.PICTURES.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text() == draw().svg(), "run scripts/pictures.py"


def test_links_are_rewritten_for_their_page() -> None:
    page = "explanation/design.md"
    assert docs_hooks.rewrite_links("[a](ARCHITECTURE.md#rooms)", "", page) == "[a](architecture.md#rooms)"
    assert docs_hooks.rewrite_links("[a](docs/how-to/gpu.md)", "", page) == "[a](../how-to/gpu.md)"
    assert docs_hooks.rewrite_links("[a](../../fuzz/README.md)", "docs/explanation", page) == "a (`fuzz/README.md`)"
    assert docs_hooks.rewrite_links("```\n[a](x)\n```", "", page) == "```\n[a](x)\n```"
    assert docs_hooks.rewrite_links("[a](https://example.org/)", "", page) == "[a](https://example.org/)"


def test_included_files_lose_their_title() -> None:
    page = "# Design\n\nPurpose.\n\nThe text is in [DESIGN.md](../../DESIGN.md).\n<!-- include: DESIGN.md -->\n"
    text = docs_hooks.expand(page, "explanation/design.md")
    assert text.startswith("# Design\n\nPurpose.\n\n")
    assert "<!-- include" not in text
    assert "The text is in" not in text
    assert len(re.findall(r"^# ", docs_hooks.FENCE.sub("", text), re.MULTILINE)) == 1


def test_pictures_become_part_of_the_page() -> None:
    text = docs_hooks.expand("![A way](../pictures/byte-path.svg)\n", "explanation/direct-io.md")
    assert text.startswith("<figure>\n<svg")
    assert "<style>" not in text
    assert "\n\n" not in text.strip()
