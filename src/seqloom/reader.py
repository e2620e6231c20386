"""Strict readers of JSON and TOML: a misspelt key or a value of the wrong type is refused with the way out.

Two ways in. `build` makes a dataclass of a file's mapping with pydantic (clusters, models, recipes). The `read_*`
functions check one value each and need no import: plans, profiles and strategies are read with them, on every start.
They take the place of a value in its file, such as ``pipelines[0].rounds[3]``, for messages.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from seqloom.errors import SeqloomError, unknown_name

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

SUFFIXES = (".json", ".toml")
MAX_INTEGER = 2**53
"""Every JSON reader keeps integers up to here exactly."""


def parse_json(text: str, what: str) -> Any:
    """Decode JSON; refuse repeated keys and NaN. `what` names the text in messages."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SeqloomError(f"{what} has the key {twice!r} twice in one object; keep one of them")
        return content

    def refuse_constant(name: str) -> NoReturn:
        raise SeqloomError(f"{what} contains {name}; give a finite number")

    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except SeqloomError:
        raise
    except (ValueError, RecursionError) as error:
        raise SeqloomError(f"{what} is not JSON ({error}); correct it or write it again") from None


def read_object(value: Any, where: str, keys: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return a copy of a mapping that has all of `keys`, maybe some of `optional`, and no others."""
    legal = [*keys, *optional]
    if not isinstance(value, dict):
        refuse(value, where, f"a JSON object with the keys {', '.join(legal)}")
    for key in value:
        if key not in legal:
            raise SeqloomError(f"{where}: {unknown_name('key', str(key), legal)}")
    missing = [key for key in keys if key not in value]
    if missing:
        raise SeqloomError(f"{where} lacks the key {missing[0]!r}; its keys are {', '.join(legal)}")
    return dict(value)


def read_list(value: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    """Read every entry of a list with `read(entry, its place)`."""
    if not isinstance(value, list | tuple):
        refuse(value, where, "a list")
    return tuple([read(entry, f"{where}[{k}]") for k, entry in enumerate(value)])


def read_integers(value: Any, where: str) -> tuple[int, ...]:
    """Read a list of whole numbers."""
    if type(value) is list and set(map(type, value)) <= {int} and max(map(abs, value), default=0) <= MAX_INTEGER:
        return tuple(value)
    return read_list(value, where, read_integer)


def read_integer(value: Any, where: str) -> int:
    """Read a whole number."""
    if type(value) is not int or abs(value) > MAX_INTEGER:
        refuse(value, where, f"a whole number within {MAX_INTEGER}")
    return value


def read_bool(value: Any, where: str) -> bool:
    """Read true or false."""
    return value if type(value) is bool else refuse(value, where, "true or false")


def read_string(value: Any, where: str) -> str:
    """Read a string."""
    return value if isinstance(value, str) else refuse(value, where, "a string")


def read_choice(value: Any, where: str, kind: type[E]) -> E:
    """Read a member of an enumeration by its value."""
    try:
        return kind(value)
    except ValueError:
        hint = unknown_name(kind.__name__.lower(), str(value), [member.value for member in kind])
        raise SeqloomError(f"{where}: {hint}") from None


def refuse(value: Any, where: str, wanted: str) -> NoReturn:
    """Raise the error of a value of the wrong kind."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    raise SeqloomError(f"{where} is {text if len(text) <= 40 else text[:37] + '...'}; give {wanted}")


# -- files that become dataclasses ---------------------------------------------------------------------------------

_EXTRA = ("unexpected_keyword_argument", "extra_forbidden")
"""pydantic's names for a key that does not exist."""


def is_file_name(name: str) -> bool:
    """Say whether ``name`` is meant as a file, by its suffix."""
    return Path(name).suffix.lower() in SUFFIXES


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the object at the top of a .json or .toml file."""
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
    """Make a dataclass whose ``__pydantic_config__`` forbids extra keys of a file's mapping; `what` names the file."""
    from pydantic import TypeAdapter, ValidationError  # only a file needs it; importing it takes a while

    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise validation_error(kind, error, what) from None


def validation_error(kind: type[Any], error: ValidationError, what: str) -> SeqloomError:
    """Say in our words what pydantic refuses in a `kind`; `what` begins the message."""
    details = error.errors(include_url=False)
    # A misspelt key also makes the right one missing: naming the misspelling is enough.
    extra = [detail for detail in details if detail["type"] in _EXTRA]
    problems = [_problem(kind, detail) for detail in extra or details]
    return SeqloomError(f"{what}: {'; '.join(problems)}")


def _problem(kind: type[Any], detail: Any) -> str:
    """Say one pydantic error in our words: where, what, and the nearest legal key."""
    place = ".".join(str(part) for part in detail["loc"]) or "the file"
    if detail["type"] in _EXTRA:
        return _unknown_key(kind, [str(part) for part in detail["loc"]])
    if detail["type"] in ("missing", "missing_argument"):
        return f"key {place!r} is missing; add it"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{place} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _unknown_key(kind: type[Any], path: list[str]) -> str:
    """Say that a key does not exist, with the nearest one of the dataclass where it stands."""
    for part in path[:-1]:
        kind = _type_at(kind, part)
    legal = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else []
    near = difflib.get_close_matches(path[-1], legal, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"legal keys: {', '.join(legal)}" if legal else "leave it out"
    return f"unknown key {'.'.join(path)!r}; {hint}"


def _type_at(kind: Any, part: str) -> Any:
    """Return the type of a dataclass field, a mapping's value or a list's entry, without None."""
    if is_dataclass(kind):
        kind = get_type_hints(kind).get(part, kind)
    else:
        kind = next((held for held in reversed(get_args(kind)) if held is not Ellipsis), kind)
    if get_origin(kind) in (Union, UnionType):
        kind = next((choice for choice in get_args(kind) if choice is not NoneType), kind)
    return kind
