"""A strategy: pipelines side by side that together cover the cluster, each with its own scheme and ranks.

The shape of a strategy is decided before any batch is known. Which documents a pipeline gets, and how many rounds it
runs, is decided step by step; a pipeline may also get nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seqloom.errors import SeqloomError

_FIELDS = ("stages", "tensor", "ulysses", "ring")


class Scheme(NamedTuple):
    """The shape of one pipeline: stages, and what a stage's ranks do together for a document.

    `ulysses` counts beyond tensor: a group of a plan has ``tensor * ulysses`` as its Ulysses degree. `gathered`:
    parameters are gathered for every pass instead of staying for the step, which takes less memory and more time.
    """

    stages: int
    tensor: int
    ulysses: int = 1
    ring: int = 1
    gathered: bool = False

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """Stages, tensor, Ulysses and ring."""
        return self[:4]

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.tensor * self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.stages * self.width

    def __str__(self) -> str:
        """Tensor x stages, then Ulysses and ring where there are any: ``4x2``, ``2x1u4``, ``1x1u8r2``.

        A ``g`` at the end: gathered for every pass.
        """
        inside = (f"u{self.ulysses}" if self.ulysses > 1 else "") + (f"r{self.ring}" if self.ring > 1 else "")
        return f"{self.tensor}x{self.stages}{inside}" + "g" * self.gathered


@dataclass(frozen=True, slots=True)
class Pipe:
    """One pipeline of a strategy: its scheme, its ranks in order, stage by stage, and the longest document, tokens."""

    scheme: Scheme
    ranks: tuple[int, ...]
    longest: int

    def __post_init__(self) -> None:
        """Refuse degrees below 1, ranks that the scheme does not make, and a pipeline that holds nothing."""
        if min(self.scheme.degrees) < 1:
            degrees = ", ".join(f"{name} {value}" for name, value in zip(_FIELDS, self.scheme.degrees, strict=True))
            raise SeqloomError(f"a pipeline with {degrees}: every degree is at least 1")
        if self.scheme.ranks != len(self.ranks) or len(set(self.ranks)) < len(self.ranks):
            raise SeqloomError(
                f"pipeline {self.scheme} on ranks {list(self.ranks)}: stages x tensor x ulysses x ring makes "
                f"{self.scheme.ranks} ranks; name so many different ones"
            )
        if self.scheme.gathered and self.scheme.width == self.scheme.tensor:
            raise SeqloomError(
                f"pipeline {self.scheme} is gathered for every pass, but all ranks of a stage have different slices of "
                "its weights, and so nobody to share them with; leave out gathered, or use Ulysses or a ring"
            )
        if self.longest < 1:
            raise SeqloomError(f"pipeline {self.scheme} holds {self.longest} tokens; give its memory room for one")

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values; `gathered` only where it is so."""
        degrees = dict(zip(_FIELDS, self.scheme.degrees, strict=True))
        gathered = {"gathered": True} if self.scheme.gathered else {}
        return {**degrees, **gathered, "ranks": list(self.ranks), "longest": self.longest}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Pipe:
        """Read what `as_dict` gave."""
        wanted = {*_FIELDS, "ranks", "longest"}
        if not isinstance(entry, Mapping) or set(entry) - {"gathered"} != wanted:
            given = sorted(entry) if isinstance(entry, Mapping) else entry
            raise SeqloomError(f"a pipeline of a strategy has {', '.join(sorted(wanted))}; given: {given}")
        numbers = [*(entry[name] for name in (*_FIELDS, "longest")), *entry["ranks"]]
        wrong = [value for value in numbers if type(value) is not int]
        if wrong:
            raise SeqloomError(f"a pipeline of a strategy has {wrong[0]!r} where a whole number belongs")
        gathered = entry.get("gathered", False)
        if type(gathered) is not bool:
            raise SeqloomError(f"a pipeline of a strategy has {gathered!r} for gathered; give true or false")
        scheme = Scheme(*(entry[name] for name in _FIELDS))._replace(gathered=gathered)
        return cls(scheme, tuple(entry["ranks"]), entry["longest"])


@dataclass(frozen=True, slots=True)
class Strategy:
    """Pipelines side by side on disjoint ranks, the ones with the longest documents first."""

    pipelines: tuple[Pipe, ...]

    def __post_init__(self) -> None:
        """Refuse an empty strategy and a rank in two pipelines."""
        if not self.pipelines:
            raise SeqloomError("a strategy without pipelines; give at least one")
        twice = [rank for rank, times in Counter(self.ranks).items() if times > 1]
        if twice:
            raise SeqloomError(f"rank {twice[0]} is in two pipelines of strategy {self}; give it to one of them")

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, pipeline by pipeline."""
        return tuple(rank for pipe in self.pipelines for rank in pipe.ranks)

    @property
    def longest(self) -> int:
        """Tokens of the longest document that some pipeline holds."""
        return max(pipe.longest for pipe in self.pipelines)

    def __str__(self) -> str:
        """The schemes with their counts: ``16x1, 4x1 x 12``."""
        counts = Counter(pipe.scheme for pipe in self.pipelines)
        return ", ".join(f"{scheme}" + (f" x {count}" if count > 1 else "") for scheme, count in counts.items())

    def as_dict(self) -> dict[str, Any]:
        """``{"pipelines": [{"stages", "tensor", "ulysses", "ring", "ranks", "longest"}]}``."""
        return {"pipelines": [pipe.as_dict() for pipe in self.pipelines]}

    @classmethod
    def from_dict(cls, entry: Strategy | Mapping[str, Any]) -> Strategy:
        """Read what `as_dict` gave; a strategy is returned as it is."""
        if isinstance(entry, Strategy):
            return entry
        if not isinstance(entry, Mapping) or not isinstance(entry.get("pipelines"), Sequence):
            raise SeqloomError(f'a strategy is {{"pipelines": [...]}}; given: {str(entry)[:80]}')
        return cls(tuple(map(Pipe.from_dict, entry["pipelines"])))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """Read what `to_json` wrote."""
        return cls.from_dict(_parsed(text))


def strategies_to_json(strategies: Iterable[Strategy]) -> str:
    """``{"strategies": [...]}`` as JSON: a list of candidates as files hold it."""
    return json.dumps({"strategies": [strategy.as_dict() for strategy in strategies]}, indent=2)


def strategies_from_json(text: str) -> tuple[Strategy, ...]:
    """Read what `strategies_to_json` wrote; other keys beside ``strategies`` are left alone."""
    content = _parsed(text)
    listed = content.get("strategies") if isinstance(content, Mapping) else None
    if not isinstance(listed, Sequence) or not listed:
        raise SeqloomError(
            'a list of strategies is {"strategies": [...]} with at least one; see seqloom propose --json'
        )
    return tuple(map(Strategy.from_dict, listed))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SeqloomError(f"strategies: not JSON ({error}); write the file with seqloom propose --json") from None
