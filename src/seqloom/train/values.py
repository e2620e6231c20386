"""What the numbers of a config may be, and how others are refused."""

from __future__ import annotations

import math

from seqloom.errors import SeqloomError


def either(section: str, values: object, one: str, other: str) -> None:
    """Refuse both or neither of two keys."""
    given = [name for name in (one, other) if getattr(values, name) is not None]
    if len(given) != 1:
        what = "both are given" if given else "neither is given"
        raise SeqloomError(f"{section}.{one} and {section}.{other}: {what}; give exactly one of them")


def at_least(section: str, values: object, least: float, *names: str) -> None:
    """Refuse numbers below `least`, and those that are not finite."""
    for name in names:
        value = getattr(values, name)
        if not least <= value < math.inf:
            raise SeqloomError(f"{section}.{name} = {value}; it must be {least} or more")


def above(section: str, values: object, limit: float, *names: str) -> None:
    """Refuse numbers that are not above `limit`, and those that are not finite."""
    for name in names:
        value = getattr(values, name)
        if not limit < value < math.inf:
            raise SeqloomError(f"{section}.{name} = {value}; it must be above {limit}")
