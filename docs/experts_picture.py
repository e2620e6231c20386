"""Figure of docs/experts.md: tokens of four ranks, the rows that they send to experts, and the weights of each.

python docs/experts_picture.py     writes docs/experts.svg and renews docs/experts.md between its markers
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

RANKS, EXPERTS, DEGREE = 4, 4, 2
CHOSEN = (
    ((0, 2), (1, 3), (0, 1), (2, 3), (0, 3)),
    ((1, 2), (0, 1)),
    ((2, 3), (0, 2), (1, 3), (0, 1)),
    ((1, 3), (2, 3), (0, 2)),
)
"""The two experts of every token, rank by rank."""
HELD = EXPERTS // DEGREE

COLOURS = ("#2f74c0", "#c76a15", "#2f8a5f", "#8256b8")
CELL, ROW, LEFT = 34, 34, 232  # pixels: a token, a rank, width of the labels
STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.soft { fill: #59636e; }
.on { fill: #ffffff; font-weight: 600; }
.page { fill: #ffffff; }
.empty { fill: none; stroke: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .soft { fill: #9198a1; } .page { fill: #0d1117; } .empty { stroke: #3d444d; }
}
"""


def own_experts(rank: int) -> range:
    """Return the experts of a rank."""
    first = rank % DEGREE * HELD
    return range(first, first + HELD)


def arriving(rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return what a rank gets: rank and number of a token, and those of its experts that are here."""
    first, own = rank // DEGREE * DEGREE, own_experts(rank)
    return [
        (source, number, tuple(expert for expert in experts if expert in own))
        for source in range(first, first + DEGREE)
        for number, experts in enumerate(CHOSEN[source])
        if set(experts) & set(own)
    ]


def name(rank: int, number: int) -> str:
    """Return how the figure calls a token."""
    return f"{'ABCD'[rank]}{number}"


def rows() -> str:
    """Say what every rank has, gets and computes, one line per rank."""
    head = ("rank", "EP group", "tokens", "experts", "rows that arrive", "products")
    lines = [head]
    for rank in range(RANKS):
        got = arriving(rank)
        names = " ".join(name(source, number) for source, number, _ in got)
        experts = " ".join(map(str, own_experts(rank)))
        products = str(sum(len(here) for *_, here in got))
        lines.append((str(rank), str(rank // DEGREE), str(len(CHOSEN[rank])), experts, names, products))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def picture() -> str:
    """Return the SVG."""
    panel = RANKS * ROW + 66
    most = max(len(arriving(rank)) for rank in range(RANKS))
    width, height = LEFT + max(most, EXPERTS * 2) * CELL + 120, 20 + 3 * panel
    body = "\n".join((*_tokens(20), *_arrived(20 + panel), *_weights(20 + 2 * panel)))
    return (
        f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
        f"<title>Tokens, rows and weights of four ranks with expert degree {DEGREE}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def _tokens(top: int) -> Iterator[str]:
    yield _text(20, top + 14, "1  Router: two of four experts for every token, by colour", "title")
    for rank, tokens in enumerate(CHOSEN):
        y = top + 36 + rank * ROW
        yield _text(20, y + 21, f"rank {rank}   (EP group {rank // DEGREE})")
        for number, experts in enumerate(tokens):
            yield from _cell(LEFT + number * CELL, y, experts, name(rank, number))


def _arrived(top: int) -> Iterator[str]:
    yield _text(20, top + 14, "2  After dispatch: a row per token with experts here", "title")
    for rank in range(RANKS):
        y, got = top + 36 + rank * ROW, arriving(rank)
        yield _text(20, y + 21, f"rank {rank}   (experts {', '.join(map(str, own_experts(rank)))})")
        for place, (source, number, here) in enumerate(got):
            yield from _cell(LEFT + place * CELL, y, here, name(source, number))
        products = sum(len(here) for *_, here in got)
        yield _text(LEFT + len(got) * CELL + 14, y + 21, f"{products} products", "soft")


def _weights(top: int) -> Iterator[str]:
    yield _text(20, top + 14, "3  Weights: each expert sharded over its ranks", "title")
    for rank in range(RANKS):
        y, peer = top + 36 + rank * ROW, rank // DEGREE
        yield _text(20, y + 21, f"rank {rank}   (with rank {(rank + DEGREE) % RANKS})")
        for expert in range(EXPERTS):
            x, half = LEFT + expert * 2 * CELL, CELL - 2
            yield f'<rect class="empty" x="{x + 1}" y="{y + 1}" width="{2 * half}" height="{half}"/>'
            if expert in own_experts(rank):
                left = x + 1 + peer * half
                yield f'<rect fill="{COLOURS[expert]}" x="{left}" y="{y + 1}" width="{half}" height="{half}"/>'
                yield _text(left + 12, y + 21, str(expert), "on")


def _cell(x: int, y: int, experts: tuple[int, ...], label: str) -> Iterator[str]:
    """A token: a part for each of its experts, and its name."""
    part = (CELL - 2) // len(experts)
    for place, expert in enumerate(experts):
        box = f'x="{x + 1 + place * part}" y="{y + 1}" width="{part}" height="{CELL - 2}"'
        yield f'<rect fill="{COLOURS[expert]}" {box}/>'
    yield _text(x + 8, y + 22, label, "on")


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" * bool(kind)} xml:space="preserve">{words}</text>'


def renewed(page: str) -> str:
    """Return the page with the text of the figure made anew."""
    before, rest = page.split("<!-- rows -->\n")
    _, after = rest.split("<!-- /rows -->")
    text = "".join(f"    {line}\n" for line in rows().splitlines())
    return f"{before}<!-- rows -->\n{text}<!-- /rows -->{after}"


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "experts.svg").write_text(picture())
    (folder / "experts.md").write_text(renewed((folder / "experts.md").read_text()))
