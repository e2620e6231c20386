"""Values read from .json and .toml files: misspelt keys and wrong types are refused with the way out."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from seqloom.errors import SeqloomError

T = TypeVar("T")

SUFFIXES = (".json", ".toml")
_EXTRA = ("unexpected_keyword_argument", "extra_forbidden")
"""pydantic's names for a key that does not exist."""


def is_file_name(name: str) -> bool:
    """Whether ``name`` is meant as a file, by its suffix."""
    return Path(name).suffix.lower() in SUFFIXES


def read_mapping(path: Path) -> dict[str, Any]:
    """The object at the top of a .json or .toml file."""
    if not path.is_file():
        raise SeqloomError(f"{str(path)!r} does not exist; check the path, it is relative to {Path.cwd()}")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SeqloomError(f"{path}: not valid {path.suffix[1:].upper()} ({error}); correct the file") from None
    except OSError as error:
        raise SeqloomError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None
    if not isinstance(content, dict):
        raise SeqloomError(f"{path}: holds {type(content).__name__}, not an object with named fields")
    return content


def build(kind: type[T], content: dict[str, Any], what: str) -> T:
    """Make a dataclass of a mapping read from a file.

    Args:
        kind: a dataclass whose ``__pydantic_config__`` forbids extra keys.
        content: the mapping.
        what: the file, for messages.
    """
    from pydantic import TypeAdapter, ValidationError  # only a file needs it; importing it takes a while

    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A misspelt key also makes the right one missing: naming the misspelling is enough.
    extra = [detail for detail in details if detail["type"] in _EXTRA]
    problems = [_problem(kind, detail) for detail in extra or details]
    raise SeqloomError(f"{what}: {'; '.join(problems)}")


def _problem(kind: type[Any], detail: Any) -> str:
    """One pydantic error in our words: where, what, and the nearest legal key."""
    place = ".".join(str(part) for part in detail["loc"]) or "the file"
    if detail["type"] in _EXTRA:
        return _unknown_key(kind, [str(part) for part in detail["loc"]])
    if detail["type"] in ("missing", "missing_argument"):
        return f"key {place!r} is missing; add it"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{place} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _unknown_key(kind: type[Any], path: list[str]) -> str:
    """Message for a key that does not exist, looked up in the dataclass where it stands."""
    for part in path[:-1]:
        kind = _inside(kind, part)
    legal = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else []
    near = difflib.get_close_matches(path[-1], legal, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"legal keys: {', '.join(legal)}" if legal else "leave it out"
    return f"unknown key {'.'.join(path)!r}; {hint}"


def _inside(kind: Any, part: str) -> Any:
    """The type under a field of a dataclass, a key of a mapping or a place in a list; a choice of None is left out."""
    if is_dataclass(kind):
        kind = get_type_hints(kind).get(part, kind)
    else:
        kind = next((held for held in reversed(get_args(kind)) if held is not Ellipsis), kind)
    if get_origin(kind) in (Union, UnionType):
        kind = next((choice for choice in get_args(kind) if choice is not NoneType), kind)
    return kind
