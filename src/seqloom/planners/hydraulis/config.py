"""A strategy: pipelines side by side that together cover the cluster, each with its own scheme and ranks.

The shape of a strategy is decided before any batch is known. Which documents a pipeline gets, and how many rounds it
runs, is decided step by step; a pipeline may also get nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqloom.errors import SeqloomError

_FIELDS = ("stages", "tensor", "ulysses", "ring")


class ParallelConfig(NamedTuple):
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
class PipelineConfig:
    """One pipeline of a strategy: its scheme, its ranks in order, stage by stage, and the longest document, tokens."""

    scheme: ParallelConfig
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
    def from_dict(cls, entry: Mapping[str, Any]) -> PipelineConfig:
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
        scheme = ParallelConfig(*(entry[name] for name in _FIELDS))._replace(gathered=gathered)
        return cls(scheme, tuple(entry["ranks"]), entry["longest"])


@dataclass(frozen=True, slots=True)
class Strategy:
    """Pipelines side by side on disjoint ranks, the ones with the longest documents first."""

    pipelines: tuple[PipelineConfig, ...]

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
        return cls(tuple(map(PipelineConfig.from_dict, entry["pipelines"])))

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


# ---- merged: planners.strategies.price
# What a scheme costs: a micro-batch takes ``c + sum(a s^2 + b s)`` on each stage, forward and backward.
#
# Three numbers and a longest length are all that choosing and assigning look at. They come from published tables or
# are
# fitted to a cost model; the plan that is made in the end is priced in full again.


@dataclass(frozen=True, slots=True)
class ConfigCost:
    """Prices of one scheme.

    Attributes:
        square: a, ns per token squared of a document.
        linear: b, ns per token.
        fixed: c, ns of a micro-batch before any document.
        longest: tokens that a micro-batch may hold, and so of the longest document.
    """

    square: float
    linear: float
    fixed: int
    longest: int

    def documents_ns(self, lengths: np.ndarray) -> np.ndarray:
        """int64[n] ns that documents of these lengths, tokens, add to a micro-batch on a stage."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.rint(self.square * (tokens * tokens) + self.linear * tokens).astype(np.int64)

    def micro_batch_ns(self, lengths: np.ndarray) -> int:
        """ns of one micro-batch of these documents on a stage, forward and backward."""
        return self.fixed + int(self.documents_ns(lengths).sum())


SchemeCosts = Mapping[ParallelConfig, ConfigCost]
"""Prices of every scheme that a cluster and a model allow."""


# ---- merged: planners.strategies.place
# Which ranks a pipeline gets: blocks inside a node, or whole nodes, aligned so that its groups are of the family.
#
# A pipeline that is smaller than a node divides it, and begins at a multiple of its size. A larger one has whole
# nodes;
# where a stage is wider than a node it has 2, 4, 8... of them, and begins at a multiple of its width. So every
# block that
# the family allows inside the pipeline is one that the cluster's family has too, and tensor ranks never leave a
# node
# unless they are wider than it.


def fits_nodes(scheme: ParallelConfig, ranks: int, node_size: int) -> bool:
    """Whether a pipeline of this scheme has a place on a cluster."""
    if scheme.ranks > ranks:
        return False
    if scheme.ranks <= node_size:
        return node_size % scheme.ranks == 0
    if scheme.ranks % node_size:
        return False
    if scheme.width <= node_size:
        return node_size % scheme.width == 0
    nodes = scheme.width // node_size
    return scheme.width == ranks or (scheme.width % node_size == 0 and nodes & (nodes - 1) == 0)


def alignment(scheme: ParallelConfig, node_size: int) -> int:
    """Multiples of this many ranks are where a pipeline of the scheme may begin."""
    return scheme.ranks if scheme.ranks <= node_size else max(scheme.width, node_size)


def placed(schemes: Iterable[ParallelConfig], costs: SchemeCosts, ranks: int, node_size: int) -> Strategy | None:
    """The strategy of these schemes, each on the first free ranks that suit it; None if one finds no place.

    Those with the widest stages choose first. Pipelines are listed by longest document, falling.
    """
    free = [True] * ranks
    pipes = []
    for scheme in sorted(schemes, key=lambda s: (-alignment(s, node_size), -s.ranks, s)):
        start = _first_free(scheme, free, node_size)
        if start is None:
            return None
        own = range(start, start + scheme.ranks)
        for rank in own:
            free[rank] = False
        pipes.append(PipelineConfig(scheme, tuple(own), costs[scheme].longest))
    return Strategy(tuple(sorted(pipes, key=lambda pipe: (-pipe.longest, pipe.ranks))))


def _first_free(scheme: ParallelConfig, free: Sequence[bool], node_size: int) -> int | None:
    if not fits_nodes(scheme, len(free), node_size):
        return None
    step = alignment(scheme, node_size)
    for start in range(0, len(free) - scheme.ranks + 1, step):
        if all(free[start : start + scheme.ranks]):
            return start
    return None


def check_placement(strategy: Strategy, ranks: int, node_size: int) -> None:
    """Refuse a strategy that leaves ranks out or has a pipeline where its groups cannot be."""
    missing = sorted(set(range(ranks)) - set(strategy.ranks))
    strange = sorted(set(strategy.ranks) - set(range(ranks)))
    if missing or strange:
        what = f"leaves out rank {missing[0]}" if missing else f"names rank {strange[0]}"
        raise SeqloomError(
            f"strategy {strategy} {what}: its pipelines have {len(strategy.ranks)} of {ranks} ranks; "
            f"a strategy covers ranks 0 to {ranks - 1}, each once (a pipeline may get no documents); propose it anew"
        )
    for pipe in strategy.pipelines:
        first, size = pipe.ranks[0], len(pipe.ranks)
        step = alignment(pipe.scheme, node_size)
        if not fits_nodes(pipe.scheme, ranks, node_size):
            raise SeqloomError(
                f"pipeline {pipe.scheme} has {size} ranks in nodes of {node_size}: it divides a node, or has whole "
                f"nodes (stages wider than a node 2, 4, 8... of them); propose strategies for this cluster"
            )
        if pipe.ranks != tuple(range(first, first + size)) or first % step:
            raise SeqloomError(
                f"pipeline {pipe.scheme} is on ranks {list(pipe.ranks)}: they follow each other from a multiple of "
                f"{step}; the nearest place is {first // step * step} to {first // step * step + size - 1}"
            )


# ---- merged: planners.strategies.blocks
# What of a strategy is planned together.


class Block(NamedTuple):
    """Ranks that are planned together: one pipeline of several stages, or one-stage pipelines that are neighbours."""

    start: int
    ranks: int
    scheme: ParallelConfig
    pipelines: tuple[int, ...]
    """Indices in the strategy."""

    @property
    def planned_like(self) -> Hashable:
        """What the plan of a block depends on, beside its documents."""
        scheme = self.scheme
        return self.start, self.ranks, scheme if scheme.gathered else (scheme.stages, scheme.tensor)


def blocks(strategy: Strategy, ranks: int, node_size: int) -> Iterator[Block]:
    """Cut a strategy into what is planned together.

    Neighbours of one stage and one tensor degree hold the same parameters. Planned together they may share a long
    document, and nothing is lost.
    """
    pipes = sorted(enumerate(strategy.pipelines), key=lambda entry: entry[1].ranks)
    at = 0
    while at < len(pipes):
        last = at
        for stop in range(at + 1, len(pipes)):
            if not _alike(pipes[at][1], pipes[stop][1]):
                break
            start, size = pipes[at][1].ranks[0], pipes[stop][1].ranks[-1] + 1 - pipes[at][1].ranks[0]
            wide = ParallelConfig(1, pipes[at][1].scheme.tensor, size // pipes[at][1].scheme.tensor)
            if start % size == 0 and fits_nodes(wide, ranks, node_size):
                last = stop
        first, end = pipes[at][1].ranks[0], pipes[last][1].ranks[-1] + 1
        yield Block(first, end - first, pipes[at][1].scheme, tuple(index for index, _ in pipes[at : last + 1]))
        at = last + 1


def _alike(one: PipelineConfig, other: PipelineConfig) -> bool:
    """Whether two pipelines may be planned together."""
    schemes = one.scheme, other.scheme
    return all(each.stages == 1 and not each.gathered for each in schemes) and schemes[0].tensor == schemes[1].tensor
