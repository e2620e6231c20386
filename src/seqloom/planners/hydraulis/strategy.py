"""Strategies of Hydraulis: pipelines of different parallel configs side by side that together cover the cluster.

A strategy is chosen before any batch is known, and stored in a file. The planner decides at every step which documents
a pipeline gets, and in how many micro-batches; a pipeline may get none.

Placement: a pipeline smaller than a node divides it and begins at a multiple of its size. A larger one has whole nodes;
a stage wider than a node has 2, 4, 8... of them and begins at a multiple of its width. So the cluster's group family
contains every block of the pipeline's family, and tensor ranks share a node unless they are more than a node has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.reader import parse_json, read_bool, read_integer, read_integers, read_object


class ParallelConfig(NamedTuple):
    """Degrees of one pipeline: stages, and the tensor, Ulysses and ring degrees inside a stage.

    `ulysses` counts beyond tensor: a group of a plan has ``tensor * ulysses`` as its Ulysses degree. With
    `reshard_after_forward`, ranks unshard parameters for every pass instead of once per step: less memory, more time.
    """

    stages: int
    tensor: int
    ulysses: int = 1
    ring: int = 1
    reshard_after_forward: bool = False

    @property
    def ranks_per_stage(self) -> int:
        """Tensor x Ulysses x ring."""
        return self.tensor * self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        """Stages x ranks per stage."""
        return self.stages * self.ranks_per_stage

    def __str__(self) -> str:
        """Tensor degree and stages, Ulysses and ring if above 1: ``t4p2``, ``t2p1u4``, ``t1p1u8r2 resharded``."""
        inside = (f"u{self.ulysses}" if self.ulysses > 1 else "") + (f"r{self.ring}" if self.ring > 1 else "")
        return f"t{self.tensor}p{self.stages}{inside}" + " resharded" * self.reshard_after_forward


_DEGREES = ParallelConfig._fields[:4]


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """One pipeline of a strategy."""

    parallel: ParallelConfig  # its degrees
    ranks: tuple[int, ...]  # in order, stage by stage
    max_tokens: int  # of the longest document, and of a micro-batch

    def __post_init__(self) -> None:
        parallel = self.parallel
        if min(parallel[:4]) < 1:
            degrees = ", ".join(f"{name} {value}" for name, value in zip(_DEGREES, parallel, strict=False))
            raise SeqloomError(f"a pipeline with {degrees}: every degree is at least 1")
        if parallel.ranks != len(self.ranks) or len(set(self.ranks)) < len(self.ranks):
            raise SeqloomError(
                f"pipeline {parallel} on ranks {list(self.ranks)}: stages x tensor x ulysses x ring makes "
                f"{parallel.ranks} ranks; name so many different ones"
            )
        if parallel.reshard_after_forward and parallel.ranks_per_stage == parallel.tensor:
            raise SeqloomError(
                f"pipeline {parallel} gathers parameters for every pass, but all ranks of a stage have different "
                "slices of its weights, so there is nothing to gather; leave out gathered, or use Ulysses or a ring"
            )
        if self.max_tokens < 1:
            raise SeqloomError(f"pipeline {parallel} holds {self.max_tokens} tokens; longest is at least 1")

    def as_dict(self) -> dict[str, Any]:
        """Fields by the keys of strategy files; ``gathered`` (`reshard_after_forward`) only where it is true."""
        degrees = dict(zip(_DEGREES, self.parallel, strict=False))
        gathered = {"gathered": True} if self.parallel.reshard_after_forward else {}
        return {**degrees, **gathered, "ranks": list(self.ranks), "longest": self.max_tokens}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> PipelineConfig:
        """Read what `as_dict` gave."""
        where = "a pipeline of a strategy"
        fields = read_object(entry, where, sorted((*_DEGREES, "ranks", "longest")), ("gathered",))
        degrees = [read_integer(fields[name], f"{where}: {name}") for name in _DEGREES]
        gathered = read_bool(fields.get("gathered", False), f"{where}: gathered")
        parallel = ParallelConfig(*degrees, reshard_after_forward=gathered)
        ranks = read_integers(fields["ranks"], f"{where}: ranks")
        return cls(parallel, ranks, read_integer(fields["longest"], f"{where}: longest"))


@dataclass(frozen=True, slots=True)
class Strategy:
    """Pipelines side by side on disjoint ranks, the ones with the longest documents first."""

    pipelines: tuple[PipelineConfig, ...]

    def __post_init__(self) -> None:
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
    def max_tokens(self) -> int:
        """Tokens of the longest document that some pipeline holds."""
        return max(pipe.max_tokens for pipe in self.pipelines)

    def __str__(self) -> str:
        """Write the parallel configs with their counts: ``t16p1, 12 of t4p1``."""
        counts = Counter(pipe.parallel for pipe in self.pipelines)
        return ", ".join((f"{count} of " if count > 1 else "") + str(parallel) for parallel, count in counts.items())

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


def strategies_to_json(strategies: Iterable[Strategy]) -> str:
    """Write a strategy file: ``{"strategies": [...]}``."""
    return json.dumps({"strategies": [strategy.as_dict() for strategy in strategies]}, indent=2)


def strategies_from_json(text: str) -> tuple[Strategy, ...]:
    """Read what `strategies_to_json` wrote; other keys beside ``strategies`` are ignored."""
    content = parse_json(text, "the list of strategies")
    listed = content.get("strategies") if isinstance(content, Mapping) else None
    if not isinstance(listed, Sequence) or not listed:
        raise SeqloomError(
            'a list of strategies is {"strategies": [...]} with at least one; see seqloom propose --json'
        )
    return tuple(map(Strategy.from_dict, listed))


@dataclass(frozen=True, slots=True)
class ConfigCost:
    """Cost of one parallel config: a micro-batch takes ``c + sum(a s^2 + b s)`` on each stage, forward and backward.

    Proposal and dispatch use nothing else. The numbers are published or fitted to a cost model; the cost model prices
    the final plan in full.
    """

    square: float  # a, ns per token squared of a document
    linear: float  # b, ns per token
    fixed: int  # c, ns of a micro-batch before any document
    max_tokens: int  # that a micro-batch may hold, and so of the longest document

    def documents_ns(self, lengths: np.ndarray) -> np.ndarray:
        """int64[n] ns that documents of int64[n] tokens add to a micro-batch on a stage."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.rint(self.square * (tokens * tokens) + self.linear * tokens).astype(np.int64)


ConfigCosts = Mapping[ParallelConfig, ConfigCost]


def fits_nodes(config: ParallelConfig, ranks: int, node_size: int) -> bool:
    """Whether a cluster has a legal placement for a pipeline of this config."""
    if config.ranks > ranks:
        return False
    if config.ranks <= node_size:
        return node_size % config.ranks == 0
    width = config.ranks_per_stage
    if config.ranks % node_size:
        return False
    if width <= node_size:
        return node_size % width == 0
    nodes = width // node_size
    return width == ranks or (width % node_size == 0 and nodes & (nodes - 1) == 0)


def alignment(config: ParallelConfig, node_size: int) -> int:
    """Multiple of ranks at which a pipeline of this config may begin."""
    return config.ranks if config.ranks <= node_size else max(config.ranks_per_stage, node_size)


def place_pipelines(
    configs: Iterable[ParallelConfig], costs: ConfigCosts, ranks: int, node_size: int
) -> Strategy | None:
    """Place every config, the widest stages first, on the first free aligned ranks; None if one does not fit.

    The strategy lists pipelines by longest document, falling.
    """
    free = [True] * ranks
    pipelines = []
    for config in sorted(configs, key=lambda config: (-alignment(config, node_size), -config.ranks, config)):
        if not fits_nodes(config, ranks, node_size):
            return None
        starts = range(0, ranks - config.ranks + 1, alignment(config, node_size))
        start = next((start for start in starts if all(free[start : start + config.ranks])), None)
        if start is None:
            return None
        free[start : start + config.ranks] = [False] * config.ranks
        pipelines.append(PipelineConfig(config, tuple(range(start, start + config.ranks)), costs[config].max_tokens))
    return Strategy(tuple(sorted(pipelines, key=lambda pipe: (-pipe.max_tokens, pipe.ranks))))


def check_placement(strategy: Strategy, ranks: int, node_size: int) -> None:
    """Refuse a strategy that leaves ranks out or has a pipeline on ranks that are not aligned."""
    missing = sorted(set(range(ranks)) - set(strategy.ranks))
    unknown = sorted(set(strategy.ranks) - set(range(ranks)))
    if missing or unknown:
        what = f"leaves out rank {missing[0]}" if missing else f"names rank {unknown[0]}"
        raise SeqloomError(
            f"strategy {strategy} {what}: its pipelines have {len(strategy.ranks)} of {ranks} ranks; "
            f"a strategy covers ranks 0 to {ranks - 1}, each once (a pipeline may get no documents); propose it anew"
        )
    for pipe in strategy.pipelines:
        first, size = pipe.ranks[0], len(pipe.ranks)
        step = alignment(pipe.parallel, node_size)
        if not fits_nodes(pipe.parallel, ranks, node_size):
            raise SeqloomError(
                f"pipeline {pipe.parallel} has {size} ranks in nodes of {node_size}: it divides a node, or has whole "
                f"nodes (stages wider than a node 2, 4, 8... of them); propose strategies for this cluster"
            )
        if pipe.ranks != tuple(range(first, first + size)) or first % step:
            raise SeqloomError(
                f"pipeline {pipe.parallel} is on ranks {list(pipe.ranks)}: they follow each other from a multiple of "
                f"{step}; the nearest place is {first // step * step} to {first // step * step + size - 1}"
            )
