"""Pictures of shapes: bars, lines and words. `Picture.save` writes .svg by itself, .png and .pdf with matplotlib.

Coordinates are pixels, y runs down. A file stands alone: no script, no font, nothing fetched. The .svg follows the
reader's light or dark page; the others are light.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from seqloom.errors import SeqloomError

WIDTH = 960
FORMATS = (".svg", ".png", ".pdf")
LIGHT = {"text": "#1f2328", "soft": "#59636e", "page": "#ffffff", "grid": "#d1d9e0", "bound": "#1f2328"}
DARK = {"text": "#e6edf3", "soft": "#9198a1", "page": "#0d1117", "grid": "#3d444d", "bound": "#e6edf3"}
"""Colours with a name change with the page; those of bars do not, and are readable on both."""
DEGREES = ("#8a99a8", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8256b8", "#946b2d")
"""Of degrees 1, 2, 4, ...: mostly those of Okabe and Ito, which the colour-blind tell apart."""
ACTIONS = {"F": "#0072b2", "B": "#e69f00", "I": "#009e73", "W": "#cc79a7"}
"""Of forward and backward, or of its input and weight halves."""
END_COLOUR, NIC_COLOUR = "#6e7781", "#8256b8"
"""Of the end of a step, and of NICs in use."""
SIZES = {"": 13, "soft": 13, "small": 11, "title": 15, "on": 11, "ink": 11}
_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: %(text)s; }
.title { font-size: 15px; font-weight: 600; }
.small { font-size: 11px; }
.soft, .small { fill: %(soft)s; }
.on, .ink { font-size: 11px; font-weight: 600; fill: #ffffff; }
.ink { fill: #1f2328; }
.page { fill: %(page)s; }
.grid { stroke: %(grid)s; fill: none; }
.bound { stroke: %(bound)s; stroke-width: 1.5; stroke-dasharray: 5 4; }
"""


def degree_colour(degree: int) -> str:
    """Return the colour of groups of so many ranks; one between two powers of two has the lower one's."""
    return DEGREES[min(degree.bit_length() - 1, len(DEGREES) - 1)] if degree else END_COLOUR


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """Boxes of one colour, float64[n, 4]: x, y, width, height."""

    boxes: np.ndarray
    fill: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line; `style` is grid or bound (dashed)."""

    x1: float
    y1: float
    x2: float
    y2: float
    style: str = "grid"


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text; `x` is its start, middle or end, as `anchor` says, and `y` its baseline."""

    x: float
    y: float
    text: str
    style: str = ""
    anchor: str = "start"


Shape = Bars | Line | Words


@dataclass(slots=True)
class Picture:
    """Shapes on a page. Charts are added below each other: `height` is where the next one begins."""

    title: str
    width: int = WIDTH
    height: float = 20
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Add shapes, later ones above earlier ones."""
        self.shapes.extend(shapes)

    def heading(self, text: str, *notes: str) -> None:
        """Add a heading, and lines in a softer colour below it."""
        self.add(Words(20, self.height + 14, text, "title"))
        for number, note in enumerate(notes):
            self.add(Words(20, self.height + 34 + 18 * number, note, "soft"))
        self.height += 28 + 18 * len(notes)

    def legend(self, entries: Sequence[tuple[str, str, float]]) -> None:
        """Add a line of little squares: (colour, words, opacity) each; the line breaks where the page ends."""
        x, y = 20.0, self.height
        for colour, words, opacity in entries:
            size = 30 + 7.2 * len(words)
            if x + size > self.width and x > 20:
                x, y = 20.0, y + 20
            if colour:
                self.add(Bars(np.array([[x, y + 2, 12, 12]]), colour, opacity))
            self.add(Words(x + (17 if colour else 0), y + 12, words, "soft"))
            x += size if colour else size - 14
        self.height = y + 30

    def to_svg(self) -> str:
        """Return the picture as SVG."""
        width, height = self.width, round(self.height)
        dark = "".join(f"  {line}\n" for line in (_STYLE % DARK).strip().splitlines())
        style = f"{_STYLE % LIGHT}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
        return (
            f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>\n"
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n'
            + "\n".join(map(_svg, self.shapes))
            + "\n</svg>\n"
        )

    def save(self, path: Path) -> None:
        """Write the picture in the format that the file's name ends in; see `check_picture`."""
        check_picture(path)
        if path.suffix == ".svg":
            path.write_text(self.to_svg(), encoding="utf-8")
        else:
            _save_with_matplotlib(self, path)


def check_picture(path: Path) -> None:
    """Refuse a format that is not written, or not without a library that is missing here."""
    if path.suffix not in FORMATS:
        raise SeqloomError(f"{str(path)!r}: a picture file ends in {', '.join(FORMATS)}; rename it")
    if path.suffix != ".svg" and find_spec("matplotlib") is None:
        raise SeqloomError(
            f'{str(path)!r}: {path.suffix} needs matplotlib; pip install "seqloom[pictures]", or name a .svg file'
        )


def time_ticks(stop_ns: float, most: int = 8) -> tuple[list[float], list[str]]:
    """Return round times from 0 to `stop_ns`, at most so many, and their labels: 0, 0.5 s, 1 s."""
    unit, size = next(((unit, size) for unit, size in (("s", 1e9), ("ms", 1e6)) if stop_ns >= size), ("us", 1e3))
    times = [tick * size for tick in round_ticks(stop_ns / size, most)]
    return times, [f"{time / size:g} {unit}" if time else "0" for time in times]


def round_ticks(stop: float, most: int = 8) -> list[float]:
    """Return 0 and multiples of 1, 2 or 5 times a power of ten up to `stop`, at most so many."""
    if stop <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(stop / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if stop < power * factor * most)
    return [step * k for k in range(int(stop / step * (1 + 1e-9)) + 1)]


def _svg(shape: Shape) -> str:
    if isinstance(shape, Bars):
        path = "".join(f"M{x:.6g} {y:.6g}h{w:.4g}v{h:.4g}h-{w:.4g}z" for x, y, w, h in shape.boxes.tolist())
        shade = f' fill-opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        return f'<path fill="{shape.fill}"{shade} d="{path}"/>'
    if isinstance(shape, Line):
        ends = f'x1="{shape.x1:.6g}" y1="{shape.y1:.6g}" x2="{shape.x2:.6g}" y2="{shape.y2:.6g}"'
        return f'<line class="{shape.style}" {ends}/>'
    look = f' class="{shape.style}"' if shape.style else ""
    look += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    return f'<text x="{shape.x:.6g}" y="{shape.y:.6g}"{look}>{escape(shape.text)}</text>'


def _save_with_matplotlib(picture: Picture, path: Path) -> None:
    """Draw the shapes on one page: a pixel is a point in a .pdf, and two dots in a .png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    size: Any = (picture.width / 72, picture.height / 72)
    figure = Figure(figsize=size, facecolor=LIGHT["page"])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.set_axis_off()
    places: dict[str, Any] = {"start": "left", "middle": "center", "end": "right"}
    for order, shape in enumerate(picture.shapes):
        if isinstance(shape, Bars):
            x, y, width, height = shape.boxes.T
            corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
            polygons: Any = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
            colour = PolyCollection(polygons, facecolor=shape.fill, alpha=shape.opacity, linewidth=0, zorder=order)
            axes.add_collection(colour)
        elif isinstance(shape, Line):
            look: dict[str, Any] = {"color": LIGHT[shape.style], "linewidth": 1 if shape.style == "grid" else 1.5}
            style = "-" if shape.style == "grid" else (0, (4, 3))
            axes.plot([shape.x1, shape.x2], [shape.y1, shape.y2], linestyle=style, zorder=order, **look)
        else:
            soft = LIGHT["soft"] if shape.style in ("soft", "small") else LIGHT["text"]
            look = {"color": "#ffffff" if shape.style == "on" else soft, "parse_math": False, "zorder": order}
            look |= {"fontsize": 0.9 * SIZES[shape.style], "ha": places[shape.anchor], "va": "baseline"}
            weight: Any = "bold" if shape.style in ("title", "on", "ink") else "normal"
            axes.text(shape.x, shape.y, shape.text, fontweight=weight, **look)
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    figure.savefig(path, dpi=144, facecolor=LIGHT["page"])
