"""Files to values: a misspelt key is named with the nearest legal one, wherever it stands."""

from dataclasses import dataclass, field

import pytest

from seqloom.errors import SeqloomError
from seqloom.reader import build

FORBID = {"extra": "forbid"}


@dataclass(frozen=True)
class Inner:
    __pydantic_config__ = FORBID

    width: int = 1


@dataclass(frozen=True)
class Outer:
    __pydantic_config__ = FORBID

    one: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    named: dict[str, Inner] = field(default_factory=dict)
    many: tuple[Inner, ...] = ()
    deep: dict[str, list[Inner]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"one": {"widht": 2}}, "one.widht"),
        ({"maybe": {"widht": 2}}, "maybe.widht"),
        ({"named": {"left": {"widht": 2}}}, "named.left.widht"),
        ({"many": [{}, {"widht": 2}]}, "many.1.widht"),
        ({"deep": {"left": [{"widht": 2}]}}, "deep.left.0.widht"),
    ],
)
def test_a_misspelt_key_is_named_wherever_it_stands(content, place):
    with pytest.raises(SeqloomError, match=rf"^the file: unknown key '{place}'; did you mean 'width'\?$"):
        build(Outer, content, "the file")


def test_a_key_like_no_other_gets_the_legal_ones():
    with pytest.raises(SeqloomError, match=r"unknown key 'named.left.zzz'; legal keys: width$"):
        build(Outer, {"named": {"left": {"zzz": 2}}}, "the file")
    assert build(Outer, {"named": {"left": {"width": 2}}}, "the file") == Outer(named={"left": Inner(2)})
