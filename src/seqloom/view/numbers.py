"""How numbers are written in tables: few digits, the same everywhere."""

from __future__ import annotations


def milliseconds(ns: float) -> str:
    """Write a time in ms, about four digits: ``0.123``, ``12.34``, ``1,234``."""
    ms = ns / 1e6
    digits = 0 if ms >= 1000 else 1 if ms >= 100 else 2 if ms >= 10 else 3
    return f"{ms:,.{digits}f}"


def duration(ns: float) -> str:
    """Write a time with its unit: ``850 us``, ``12.3 ms``, ``4.56 s``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns:.0f} ns"


def percent(share: float) -> str:
    """Write a share in percent, one decimal, without the sign."""
    return f"{100 * share:.1f}"


def tokens(count: int) -> str:
    """Write a power-of-two border of lengths: ``512``, ``1K``, ``128K``, ``1M``."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
