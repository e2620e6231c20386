"""The result tables of the USP paper, LLaMA2-7B and LLaMA3-8B on one and two nodes of 8 A800."""

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    """One of the paper's tables."""

    model: str
    nodes: int
    tokens: int  # of a document, in units of K
    documents: int
    published: str  # tensor x Ulysses x ring, then TFLOPS per GPU

    @property
    def cells(self) -> list[tuple[tuple[int, int, int], float | None]]:
        """Degrees, and TFLOPS; None: out of memory."""
        words = self.published.split()
        degrees = [tuple(map(int, word.split("x"))) for word in words[::2]]
        return list(zip(degrees, (None if word == "OOM" else float(word) for word in words[1::2]), strict=True))


NODE_64K = "4x2x1 260.2  4x1x2 255.0  8x1x1 238.9"
NODE_30K = "1x8x1 250.6  2x4x1 239.2  4x1x1 230.1  2x1x4 226.6  1x1x8 218.0  8x1x1 198.0"
NODES_64K = """1x8x2 220.3  1x4x4 222.2  1x2x8 209.2  1x1x16 196.9  8x1x2 209.7
               4x2x2 197.9  4x1x4 198.1  2x4x2 141.7  2x2x4 144.4  2x1x8 163.8"""
NODES_80K = """1x8x2 245.4  1x4x4 247.8  1x2x8 233.2  1x1x16 221.1  8x1x2 226.6
               4x2x2 228.8  4x1x4 216.8  2x4x2 184.8  2x2x4 184.4  2x1x8 201.6"""
NODES_120K = "1x8x2 OOM  1x4x4 OOM  1x2x8 OOM  1x1x16 OOM  8x1x2 254.5  4x2x2 266.0  4x1x4 263.3  2x4x2 238.3"
TABLES = (
    Table("llama-7b", 1, 64, 1, NODE_64K),
    Table("llama-7b", 1, 30, 16, NODE_30K),
    Table("llama3-8b", 2, 64, 1, NODES_64K),
    Table("llama3-8b", 2, 80, 1, NODES_80K),
    Table("llama3-8b", 2, 120, 1, NODES_120K),
    Table("llama3-8b", 2, 64, 2, "8x1x1 228.2"),
    Table("llama3-8b", 2, 80, 2, "8x1x1 240.3"),
    Table("llama3-8b", 2, 160, 1, "4x2x2 284.5  8x1x2 280.9  4x1x4 285.8"),
    Table("llama3-8b", 2, 190, 1, "4x1x4 285.8"),
    Table("llama3-8b", 2, 208, 1, "8x1x2 269.8"),
)
