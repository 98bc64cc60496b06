"""Draw the pictures of the documentation as SVG into `docs/pictures/`. Standard library only; `make docs` calls it.

    python scripts/pictures.py

Text and lines have the colour of the page around them, boxes a tint of their own, so that pictures are readable on
light and on dark pages.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
BLUE, GREEN, ORANGE, GREY = "#4a90d9", "#4caf7a", "#e0903a", "#8a8f98"
# The colour of a file by itself, outside of a page that sets it.
STYLE = "<style>:root { color: #24292f } @media (prefers-color-scheme: dark) { :root { color: #e6e6e6 } }</style>"


@dataclass
class Picture:
    """A drawing that grows shape by shape."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, *, text: str = "", colour: str = GREY) -> None:
        """Draw a tinted box, with lines of text in its middle."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{colour}" fill-opacity="0.28" stroke="{colour}"/>'
        )
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4 + 16 * (index - (len(lines) - 1) / 2), line, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write one line."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "currentColor") -> None:
        """Draw a straight arrow along an axis."""
        self.line(x, y, to_x, to_y, colour=colour)
        right, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        back_x, back_y = to_x - 8 * right, to_y - 8 * down
        one, other = (back_x + 4 * down, back_y + 4 * right), (back_x - 4 * down, back_y - 4 * right)
        points = " ".join(f"{px:g},{py:g}" for px, py in ((to_x, to_y), one, other))
        self.shapes.append(f'<polygon points="{points}" fill="{colour}"/>')

    def line(
        self, x: float, y: float, to_x: float, to_y: float, *, colour: str = "currentColor", dash: str = ""
    ) -> None:
        """Draw a line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.5"{dashes}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'font-family="sans-serif" font-size="13" role="img" aria-label="{escape(self.title)}">'
        )
        return "\n".join([head, STYLE, *self.shapes, "</svg>"]) + "\n"


def byte_path() -> Picture:
    """Show the direct and the bounced way of a byte."""
    picture = Picture(760, 250, "The direct, the bounced and the buffered way between an NVMe drive and a tensor")
    picture.box(10, 30, 110, 190, text="NVMe drive", colour=GREY)
    picture.box(640, 30, 110, 190, text="your tensor", colour=GREEN)
    for y, middle, colour, label in (
        (30, "", BLUE, "direct: file and memory aligned"),
        (95, "bounce buffer", ORANGE, "bounced: memory not aligned, or a ragged read"),
        (160, "page cache", GREY, "buffered: ragged ends of writes, or no direct I/O"),
    ):
        picture.text(380, y + 6, label, "middle")
        if not middle:
            picture.arrow(120, y + 30, 640, y + 30, colour)
            continue
        picture.box(300, y + 14, 160, 34, text=middle, colour=colour)
        picture.arrow(120, y + 31, 300, y + 31, colour)
        picture.arrow(460, y + 31, 640, y + 31, colour)
        picture.text(210, y + 25, "device", "middle")
        picture.text(550, y + 25, "copy", "middle")
    return picture


def memory_bound() -> Picture:
    """Show how streaming, offloading and the swapper divide their memory."""
    picture = Picture(760, 300, "How streaming and offloading divide the memory that they are given")
    rows = (
        (
            'stream(memory="16GB"): weights only',
            (
                ("small weights\nat most 1/8", 90, GREY),
                ("rows\n1/16", 60, GREY),
                ("resident layers", 250, BLUE),
                ("slots that layers\npass through", 200, ORANGE),
            ),
            "on top: activations, KV cache, 8 MiB a worker",
        ),
        (
            'offload_parameters(memory="4GB"): parameters only',
            (
                ("the block\nthat runs", 200, BLUE),
                ("next blocks,\nread ahead", 220, ORANGE),
                ("changed blocks,\nbeing written", 180, GREEN),
            ),
            "on top: small parameters (at most 1/8), gradients, activations, 8 MiB a worker",
        ),
        (
            'Swapper(memory="8GB"), swap_dir=: tensors by key',
            (
                ("read ahead\n3/8, at most 1 GiB", 190, ORANGE),
                ("kept free\n3/8, at most 1 GiB", 190, GREEN),
                ("tensors that stay", 220, BLUE),
            ),
            "on top: 8 MiB a worker",
        ),
    )
    for index, (title, parts, on_top) in enumerate(rows):
        y, x = 8 + 98 * index, 10.0
        picture.text(10, y + 12, title)
        for text, width, colour in parts:
            picture.box(x, y + 20, width, 44, text=text, colour=colour)
            x += width
        picture.text(10, y + 80, on_top)
        picture.line(610, y + 14, 610, y + 70, dash="4 3")
        picture.text(620, y + 46, "the bound")
    return picture


def streamed_token() -> Picture:
    """Show how reading and computing overlap while a token is generated."""
    picture = Picture(760, 190, "A timeline of one token: the disk reads the next layers while the CPU computes")
    layers = (("0", 0), ("1", 1), ("2", 0), ("3", 1), ("4", 0), ("0", 1))
    picture.text(10, 56, "disk")
    picture.text(10, 116, "CPU")
    x = 90.0
    for index, (name, slot) in enumerate(layers):
        left = x + index * 100
        picture.box(left, 36, 92, 32, text=f"read {name}", colour=ORANGE if slot else BLUE)
        if index < len(layers) - 1:
            picture.box(left + 100, 96, 56, 32, text=f"layer {name}", colour=ORANGE if slot else BLUE)
    picture.line(650, 20, 650, 140, dash="4 3")
    picture.text(644, 16, "the token is done", "end")
    picture.text(
        90,
        160,
        "The colour is the slot: a layer is read into one slot while the layer before it computes in the other.",
    )
    picture.text(90, 180, "Here the disk is the limit: it never waits, and the CPU waits for each layer.")
    return picture


def overlapped_checkpoint() -> Picture:
    """Show a background save during training steps."""
    picture = Picture(760, 230, "A background checkpoint: training waits for the copy only, or for nothing")
    for y, title, copied in ((10, "async_=True", True), (120, "async_=True in overlap(optimizer)", False)):
        picture.text(10, y + 10, title)
        picture.text(10, y + 42, "training")
        picture.text(10, y + 82, "disk")
        picture.box(90, y + 22, 110, 30, text="step 100", colour=BLUE)
        if copied:
            picture.box(204, y + 22, 60, 30, text="copy", colour=ORANGE)
            picture.box(268, y + 22, 110, 30, text="step 101", colour=BLUE)
            picture.box(382, y + 22, 110, 30, text="step 102", colour=BLUE)
            picture.box(496, y + 22, 110, 30, text="step 103", colour=BLUE)
            picture.box(214, y + 62, 290, 30, text="write step 100, sync, rename", colour=GREEN)
        else:
            picture.box(204, y + 22, 130, 30, text="forward, backward", colour=BLUE)
            picture.box(404, y + 22, 90, 30, text="optimizer", colour=BLUE)
            picture.box(498, y + 22, 108, 30, text="step 102", colour=BLUE)
            picture.text(369, y + 42, "may wait", "middle")
            picture.box(204, y + 62, 196, 30, text="read and write tensors", colour=GREEN)
            picture.box(404, y + 62, 100, 30, text="sync, rename", colour=GREEN)
    return picture


PICTURES = {
    "byte-path": byte_path,
    "memory-bound": memory_bound,
    "streamed-token": streamed_token,
    "overlapped-checkpoint": overlapped_checkpoint,
}


def main() -> int:
    """Write every picture whose contents have changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"pictures: {path.relative_to(FOLDER.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
