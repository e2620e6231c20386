"""Dotted overrides: `optimiser.lr=1e-4` beside a config file, with values typed as TOML types them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from seqloom.errors import SeqloomError

_OPENING = ('"', "'", "[", "{")
"""A value that begins so is meant as TOML, so it must be valid TOML."""


def parse_overrides(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read `section.key=value` into a mapping of sections to keys; a later one wins.

    A value is a number, true, false, "a text" or [a list], as in the file. What TOML cannot read is a text without
    quotes: `plan.planner=flex`. Nothing after the `=` means None: the key is as if the file did not have it.

    Args:
        overrides: as given on a command line.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key) or "." in key:
            raise SeqloomError(f"override {override!r}: spell it section.key=value, for example optimiser.lr=1e-4")
        sections.setdefault(section, {})[key] = _value(text.strip(), override)
    return sections


def merged(content: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `content` with the overrides in it; None takes a key away. Neither argument is changed."""
    result = dict(content)
    for section, keys in overrides.items():
        below = result.get(section, {})
        if not isinstance(below, dict):
            continue  # the type check that follows says what is wrong with it
        result[section] = {key: value for key, value in (below | keys).items() if value is not None}
    return result


def _value(text: str, override: str) -> Any:
    """Return the value that `text` spells."""
    if not text:
        return None
    try:
        content = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text.startswith(_OPENING):
            raise SeqloomError(f"override {override!r}: {text} is not a TOML value ({error}); correct it") from None
        return text
    value = content["value"]
    if len(content) > 1 or not isinstance(value, bool | int | float | str | list):
        return text  # a date is a good name for a folder, and no key holds one
    return value
