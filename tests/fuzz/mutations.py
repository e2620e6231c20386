"""Mutations of valid files: bytes that are flipped, cut and repeated; values of JSON and TOML that are exchanged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31, 2**53, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300, 3.0)
ODD_VALUES = (
    *ODD_NUMBERS,
    *(None, True, False, "", "x", "../../x", "0", "1e9", "nan", "\x00", "é" * 3, "[bold]", "a" * 300),
    *([], {}, [[]], {"": None}, [1, "a", None], [0] * 50),
)
ODD_BYTES = (b"\x00", b"\xff", b"-", b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"]", b",", b"1e999", b"NaN", b"9" * 30)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return the data with one to four changes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        kind, at = draw.randrange(6), draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 1, 2, 8, 64, len(changed))))
        if kind == 0:
            del changed[at:end]
        elif kind == 1:
            changed[at:at] = changed[at:end][:4096]
        elif kind == 2:
            changed[at:at] = draw.choice(ODD_BYTES)
        elif kind == 3 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 4 and at < len(changed):
            changed[at] = draw.randrange(256)
        else:
            changed[at:end] = draw.choice(ODD_BYTES)
    return bytes(changed)


def mutate_value(value: Any, draw: random.Random) -> Any:
    """Return a copy of a tree of lists and dictionaries with one place changed, missing, or twice there."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.05:
        return draw.choice(ODD_VALUES)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(copy)) if isinstance(copy, dict) else draw.randrange(len(copy))
    kind = draw.randrange(10)
    if kind == 0:
        del copy[key]
    elif kind == 1 and isinstance(copy, dict):
        copy[draw.choice(("", "x", str(key) + "s", str(key).upper()))] = copy[key]
    elif kind == 1:
        copy.insert(key, copy[key])
    elif kind == 2:
        copy[key] = draw.choice(ODD_VALUES)
    else:
        copy[key] = mutate_value(copy[key], draw)
    return copy


def mutate_json(text: str, draw: random.Random) -> str:
    """Return JSON with changed values, or changed as text."""
    if draw.random() < 0.3:
        return mutate_text(text, draw)
    value = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        value = mutate_value(value, draw)
    return json.dumps(value)


def mutate_lines(text: str, draw: random.Random) -> str:
    """Return text with lines dropped, repeated, exchanged or changed."""
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines)) if lines else 0
        kind = draw.randrange(5)
        if kind == 0 and lines:
            del lines[at]
        elif kind == 1 and lines:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif kind == 2 and lines:
            words = lines[at].split(" ")
            words[draw.randrange(len(words))] = str(draw.choice(ODD_VALUES))
            lines[at] = " ".join(words)
        elif lines:
            lines[at] = mutate_text(lines[at], draw)
    return "\n".join(lines) + "\n"


def mutate_text(text: str, draw: random.Random) -> str:
    """Return the text changed as bytes; what is no UTF-8 is left as surrogates."""
    return mutate_bytes(text.encode("utf-8", "surrogateescape"), draw).decode("utf-8", "surrogateescape")


def mutate_text_file(change: Callable[[str, random.Random], str]) -> Callable[[bytes, random.Random], bytes]:
    """Return a mutation of a file from one of its text."""

    def mutate(data: bytes, draw: random.Random) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        try:
            return change(text, draw).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # an odd value has surrogates of its own
            return mutate_bytes(data, draw)

    return mutate
