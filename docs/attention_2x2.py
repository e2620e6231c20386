"""Figures and tables of docs/attention.md: tokens and tiles of a 2 x 2 group, and the support matrix of the kernels.

python docs/attention_2x2.py     writes docs/attention-2x2.svg and renews docs/attention.md between its markers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from seqloom.attention import Segments
from seqloom.attention.dropout import HeadDropout, WeightDropout
from seqloom.attention.kernels import AttentionShape, Capabilities
from seqloom.attention.kernels.dispatch import KERNELS, built_in_table
from seqloom.layout import Span
from seqloom.plan import Group
from seqloom.plan.round import even_ranges

HEADS, KV_HEADS = 4, 2
GROUP = Group(ranks=(0, 1, 2, 3), ulysses=2, ring=2, spans=(Span(0, 0, 16), Span(1, 0, 8)))
CHUNKS = 2 * GROUP.ring
NAMES = "AB"

HEAD_COLOURS, STEP_COLOURS = ("#2f74c0", "#c76a15"), ("#2f8a5f", "#8256b8")
CELL, ROW, TILE = 24, 30, 34  # pixels: a token, a rank, a tile of the mask
LEFT, GAP = 196, 24  # width of the labels, space between documents
RIGHT = LEFT + GROUP.tokens * CELL + GAP
STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.soft { fill: #59636e; }
.on { fill: #ffffff; font-weight: 600; }
.page { fill: #ffffff; }
.empty { fill: none; stroke: #d1d9e0; }
.edge { stroke: #59636e; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .soft { fill: #9198a1; } .page { fill: #0d1117; } .empty { stroke: #3d444d; }
  .edge { stroke: #9198a1; }
}
"""


def owner(chunk: int) -> int:
    """Return the ring index that holds a chunk of a document."""
    return min(chunk, CHUNKS - 1 - chunk)


def step(query: int, key: int) -> int:
    """Return the ring step in which the tile of two chunks is computed."""
    return (owner(query) - owner(key)) % GROUP.ring


# -- text ---------------------------------------------------------------------------------------------------------


def holdings() -> str:
    """Say what every rank holds outside and inside attention, one line per rank."""
    rows = [("rank", "ulysses", "ring", "outside attention: tokens", "inside: tokens", "heads", "kv heads")]
    outside, inside = GROUP.token_layout(), GROUP.head_layout(HEADS)
    kv = GROUP.head_layout(HEADS, KV_HEADS)
    for index, rank in enumerate(GROUP.ranks):
        ulysses, ring = index % GROUP.ulysses, index // GROUP.ulysses
        tokens = (_spans(outside.spans(rank)), _spans(inside.spans(rank)))
        rows.append((str(rank), str(ulysses), str(ring), *tokens, _heads(inside, rank), _heads(kv, rank)))
    return _aligned(rows)


def tiles() -> str:
    """Say, for a document's chunks, in which ring step a tile is computed: rows are queries, columns keys."""
    rows = [("", "", "key chunk", *map(str, range(CHUNKS)))]
    rows.append(("query chunk", "of ring", "of ring", *(str(owner(key)) for key in range(CHUNKS))))
    for query in range(CHUNKS):
        cells = ("." if key > query else f"{step(query, key)}{chr(92) * (key == query)}" for key in range(CHUNKS))
        rows.append((str(query), str(owner(query)), "", *cells))
    return _aligned(rows)


def _spans(spans: Iterable[Span]) -> str:
    return " ".join(f"{NAMES[document]}[{start}:{stop})" for document, start, stop in spans)


def _heads(layout, rank: int) -> str:
    low, high = next((a, b) for r, a, b in zip(layout.rank, layout.start2, layout.stop2, strict=True) if r == rank)
    return " ".join(str(head) for head in range(low, high))


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


# -- picture ------------------------------------------------------------------------------------------------------


def picture() -> str:
    """Return the SVG."""
    panel = GROUP.degree * ROW + 84
    width, height = RIGHT + 100, 20 + 2 * panel + 56 + CHUNKS * TILE + 20
    body = [
        *_panel(20, "1  Outside attention: a run of tokens, all heads (A0 is chunk 0 of document A)", after=False),
        *_panel(20 + panel, "2  After the Ulysses exchange: all tokens of the ring index, some heads", after=True),
        *_mask(20 + 2 * panel),
    ]
    lines = "\n".join(body)
    return (
        f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
        f"<title>Who holds what in a group of ulysses 2 x ring 2</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n{lines}\n</svg>\n'
    )


def _x(span: Span, position: int) -> int:
    before = sum(other.tokens for other in GROUP.spans[: span.document])
    return LEFT + (before + position) * CELL + GAP * span.document


def _panel(top: int, title: str, *, after: bool) -> Iterator[str]:
    """One row per rank, one cell per token; the upper half of a cell is heads 0-1, the lower one heads 2-3."""
    yield _text(20, top + 14, title, "title")
    layout = GROUP.head_layout(HEADS) if after else GROUP.token_layout()
    first = top + 50
    for span in GROUP.spans:
        for chunk, (start, _) in enumerate(even_ranges(span.tokens, CHUNKS)):
            yield _text(_x(span, start) + 4, top + 40, f"{NAMES[span.document]}{chunk}", "soft")
    for index, rank in enumerate(GROUP.ranks):
        y, ulysses = first + index * ROW, index % GROUP.ulysses
        yield _text(20, y + 17, f"rank {rank}   (ulysses {ulysses}, ring {index // GROUP.ulysses})")
        held = {(d, t) for d, start, stop in layout.spans(rank) for t in range(start, stop)}
        for span in GROUP.spans:
            for token in range(span.start, span.stop):
                x, half = _x(span, token), (CELL - 2) // 2
                yield f'<rect class="empty" x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}"/>'
                for part in range(2) if (span.document, token) in held else ():
                    if not after or part == ulysses:
                        box = f'x="{x + 1}" y="{y + 1 + part * half}" width="{CELL - 2}" height="{half}"'
                        yield f'<rect fill="{HEAD_COLOURS[part]}" {box}/>'
        if after:
            yield _text(RIGHT + 14, y + 17, f"heads {_heads(layout, rank)}")
    for span in GROUP.spans:
        for start, _ in even_ranges(span.tokens, CHUNKS)[1:]:
            x = _x(span, start)
            yield f'<line class="edge" x1="{x}" y1="{first - 4}" x2="{x}" y2="{first + 4 * ROW - 2}"/>'


def _mask(top: int) -> Iterator[str]:
    """The mask of one document by chunks, coloured by ring step."""
    yield _text(20, top + 14, "3  In the ring: where and in which step a tile of the mask is computed", "title")
    size, left, first = TILE, LEFT + 60, top + 56
    yield _text(left - 44, first - 8, "keys", "soft")
    for key in range(CHUNKS):
        yield _text(left + key * size + 8, first - 8, f"A{key}", "soft")
    for query in range(CHUNKS):
        y = first + query * size
        yield _text(20, y + 21, f"queries A{query}, computed by ring {owner(query)}")
        for key in range(CHUNKS):
            x = left + key * size
            yield f'<rect class="empty" x="{x + 1}" y="{y + 1}" width="{size - 2}" height="{size - 2}"/>'
            if key <= query:
                corners = f"{x + 1},{y + 1} {x + size - 1},{y + size - 1} {x + 1},{y + size - 1}"
                square = corners + f" {x + 1},{y + 1} {x + size - 1},{y + 1} {x + size - 1},{y + size - 1}"
                shape = corners if key == query else square
                yield f'<polygon fill="{STEP_COLOURS[step(query, key)]}" points="{shape}"/>'
                right, down = (7, 28) if key == query else (13, 22)
                yield _text(x + right, y + down, str(step(query, key)), "on")
    notes = (
        "0: step 0, on the keys that the ring index holds itself",
        "1: step 1, on the keys that its neighbour has sent meanwhile",
        "triangle: the diagonal, half of it masked; empty: never computed",
        "so each ring index has the work of two whole tiles in each step",
    )
    for line, note in enumerate(notes):
        yield _text(left + CHUNKS * size + 28, first + 21 + line * size, note)


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" * bool(kind)} xml:space="preserve">{words}</text>'


SUPPORTED, REFUSED = "supported", "refused"
ENGINE = "engine"
"""The column of `attention(...)`: some kernel supports it."""


class Feature(NamedTuple):
    """One row: an example that has the feature. Fields left out are those that every kernel takes."""

    name: str
    segments: Segments = Segments.packed([512, 512])
    device: str | None = None
    dtype: torch.dtype | None = None
    dim: int = 128
    kv_heads: int = 8
    softcap: float | None = None
    dropout: WeightDropout | None = None


NO_TOKENS = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
FEATURES = (
    Feature("CPU", device="cpu"),
    Feature("CUDA", device="cuda"),
    *(
        Feature(str(dtype).removeprefix("torch."), dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ),
    *(Feature(f"head dim {dim}", dim=dim) for dim in (64, 80, 100, 128, 192, 256, 512)),
    Feature("grouped-query heads (GQA)", kv_heads=2),
    Feature("one key/value head (MQA)", kv_heads=1),
    Feature("causal, packed documents"),
    Feature("full (not causal), packed documents", Segments.packed([512, 512], causal=False)),
    Feature("sliding window", Segments.packed([512, 512], window=128)),
    Feature("chunked attention", Segments.packed([512, 256], attention_chunk=192)),
    Feature("piece with its prefix", Segments.of([(0, 256, 0, 512, 256)])),
    Feature("any offset", Segments.of([(0, 256, 0, 512, 100)])),
    Feature("tile without mask", Segments.of([(0, 256, 0, 512, 512)])),
    Feature("logit soft-cap", softcap=30.0),
    Feature("dropout of attention weights", dropout=HeadDropout(0.1, seed=0, layer=0).of_rows(NO_TOKENS, NO_TOKENS)),
)
ALWAYS = ("attention sinks", "values wider or narrower than keys")
"""Options that the engine adds to any kernel."""
NEVER = ("bias, ALiBi",)
"""Options that the engine refuses before any kernel is asked."""


def support_matrix() -> str:
    """Return the matrix in Markdown: a row per feature, a column per kernel, the engine last.

    Every cell is the kernel's answer to an example: it supports it, or refuses it.
    """
    kernels = {name: entry.make().capabilities for name, entry in KERNELS.items()}
    columns = [*kernels, ENGINE]
    rows = [(feature.name, _answers(feature, kernels)) for feature in FEATURES]
    rows += [(name, dict.fromkeys(columns, SUPPORTED)) for name in ALWAYS]
    rows += [(name, dict.fromkeys(columns, REFUSED)) for name in NEVER]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells[column] for column in columns) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def _answers(feature: Feature, kernels: Mapping[str, Capabilities]) -> dict[str, str]:
    """Ask every kernel, and the engine, which has what its best kernel has."""
    cells = {name: _answer(kernel, feature) for name, kernel in kernels.items()}
    cells[ENGINE] = SUPPORTED if SUPPORTED in cells.values() else REFUSED
    return cells


def _answer(kernel: Capabilities, feature: Feature) -> str:
    """Ask one kernel, on its own device and in its own dtype where the feature names none."""
    shape = AttentionShape(
        heads=8,
        kv_heads=feature.kv_heads,
        dim=feature.dim,
        dtype=feature.dtype or kernel.dtypes[0],
        device=torch.device(feature.device or kernel.devices[0]),
        scale=feature.dim**-0.5,
        softcap=feature.softcap,
        dropout=feature.dropout,
    )
    return SUPPORTED if kernel.unsupported(feature.segments, shape) is None else REFUSED


def kernel_times() -> str:
    """Return the times of documents on an H200 in Markdown, microseconds: a row per length, a column per kernel."""
    (measurement,) = [one for one in built_in_table().measurements if one.device == "NVIDIA H200"]
    curves = {one.kernel: {point.length: point for point in one.causal} for one in measurement.times}
    lines = ["| tokens | " + " | ".join(curves) + " |", "|---" * (len(curves) + 1) + "|"]
    for length in next(iter(curves.values())):
        points = [curve[length] for curve in curves.values()]
        times = [f"{(point.forward_ns + point.backward_ns) / 1e3:,.1f}" for point in points]
        lines.append(f"| {length:,} | " + " | ".join(times) + " |")
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """Return the page with everything between markers made anew."""
    parts = {"holdings": _indented(holdings()), "tiles": _indented(tiles())}
    parts |= {"times": kernel_times(), "support": support_matrix()}
    for name, text in parts.items():
        before, rest = page.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- /{name} -->")
        page = f"{before}<!-- {name} -->\n{text}<!-- /{name} -->{after}"
    return page


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "attention-2x2.svg").write_text(picture())
    (folder / "attention.md").write_text(renewed((folder / "attention.md").read_text()))
