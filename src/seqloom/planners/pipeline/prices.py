"""Times and memory of a draft's units on every stage, for all of them at once.

The same numbers as the simulator's, up to what several groups of a unit put on one network card: units are priced as
if each had ranks of its own, and stages of equal shares only once.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import copy_ns
from seqloom.cost.plan_cost import COST_COLUMNS, rank_costs, rank_times, scale_to_layers
from seqloom.cost.stages import ActivationBytes, StageMemory
from seqloom.plan import Checkpoint, Group, LayerRange, Reduce
from seqloom.planners.pipeline.micro_batches import Draft
from seqloom.planners.pipeline.placement import Level, work_of
from seqloom.planners.pipeline.stage_layout import Line
from seqloom.schedules import Times
from seqloom.simulate.tasks import stage_message_ns
from seqloom.simulate.windows import FULL_SHARE, extend_for_offload, forward_and_weight_cuts, share_between


class Carry(NamedTuple):
    """Keys and values of documents in pieces. int64[stages, units] bytes on the fullest rank."""

    begun: np.ndarray  # that come with a unit's F
    returning: np.ndarray  # gradients that come with its backward
    done: np.ndarray  # of both, that go with it


class UnitPrices:
    """Prices of one draft on one line."""

    def __init__(self, cost: CostModel, line: Line, draft: Draft, lengths: np.ndarray) -> None:
        """Nothing is priced before it is asked for."""
        self.cost, self.line, self.draft, self.lengths = cost, line, draft, lengths
        works = [work_of(cost, line, seats, 0, Level(Checkpoint.NONE)) for seats in draft.seats]
        self._groups: list[Group] = [group for work in works for group in work.groups]
        self._unit = np.repeat(np.arange(len(works)), [len(work.groups) for work in works])
        self._tables: dict[Checkpoint, np.ndarray] = {}
        self._times: dict[Level, Times] = {}

    def times(self, level: Level) -> Times:
        """int64[stages, units] ns of forward, input half and weight half, all units kept alike."""
        if level == Level(Checkpoint.STAGE):  # running the stage again is running its layers again
            return self.times(Level(Checkpoint.FULL))
        if level not in self._times:
            table = self._table(level.checkpoint)
            shares = self.line.shares
            alike = {_size(share): share for share in shares}
            found = {size: self._stage_times(table, share, level) for size, share in alike.items()}
            columns = [np.stack([found[_size(share)][k] for share in shares]) for k in range(3)]
            apart = [[self.cost.engine.split_overhead_ns(share.stop - share.first)] for share in shares]
            self._times[level] = Times(*columns, apart=np.array(apart, dtype=np.int64))
        return self._times[level]

    def _table(self, checkpoint: Checkpoint) -> np.ndarray:
        """int64[groups, len(NAMES)]: parts of all groups, all layers."""
        if checkpoint == Checkpoint.STAGE:
            return self._table(Checkpoint.FULL)
        if checkpoint not in self._tables:
            priced = self.cost.group_costs(self._groups, MemoryPolicy(checkpoint, Reduce.STEP, resident=True))
            columns = [[getattr(parts, name) for name in COST_COLUMNS] for parts in priced]
            self._tables[checkpoint] = np.array(columns, dtype=np.int64)
        return self._tables[checkpoint]

    def _stage_times(self, table: np.ndarray, share: LayerRange, level: Level) -> tuple[np.ndarray, ...]:
        """int64[units] each of forward, input half, weight half on one stage."""
        width, units = self.line.width, len(self.draft.seats)
        own = scale_to_layers(share, table)
        degrees = np.array([len(group.ranks) for group in self._groups])
        group = np.repeat(np.arange(len(degrees)), degrees)
        rank = np.concatenate([np.array(group.ranks) for group in self._groups]) + width * self._unit[group]
        parts = rank_costs(own, rank, group, width * units)
        rank_ns, _ = rank_times(parts, own, rank, group, degrees == 1)
        by_unit = rank_ns.reshape(units, width)
        slowest = by_unit.argmax(axis=1) + width * np.arange(units)
        length = np.maximum(rank_ns[slowest], parts[:, COST_COLUMNS.index("link")].reshape(units, width).max(axis=1))
        forward, weights = forward_and_weight_cuts(
            parts[slowest], rank_ns[slowest], level.checkpoint, self.cost.engine.matmul_share
        )
        if level.offload:
            kept = StageMemory(self.cost, share).activation_bytes(level.checkpoint, offload=False).held
            copied = np.array([copy_ns(kept * tokens) for tokens in self.tokens.tolist()])
            length, forward, weights = extend_for_offload(length, forward, weights, copied)
        none, whole = np.zeros_like(forward), np.full_like(forward, FULL_SHARE)
        edges = (none, forward, weights, whole)
        return tuple(share_between(length, low, high) for low, high in pairwise(edges))

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64[units]: tokens on the fullest rank."""
        held = np.zeros((len(self.draft.seats), self.line.width), dtype=np.int64)
        for unit, group in zip(self._unit.tolist(), self._groups, strict=True):
            edges = self.cost.padded_lengths(np.array([(start, stop) for _, start, stop in group.spans]))
            held[unit, list(group.ranks)] += -(-int((edges[:, 1] - edges[:, 0]).sum()) // group.degree)
        return held.max(axis=1)

    @cached_property
    def message(self) -> int:
        """ns of a message between stages: the median unit's, between the first two."""
        order = np.argsort(self.tokens, kind="stable")
        return stage_message_ns(self.cost, int(self.tokens[order[len(order) // 2]]), *self.line.stages[:2])

    def holding(self, level: Level) -> list[ActivationBytes]:
        """Of every stage, per token."""
        return [StageMemory(self.cost, share).activation_bytes(*level) for share in self.line.shares]

    @cached_property
    def carry(self) -> Carry:
        """What comes and goes with documents in pieces."""
        shape = (len(self.line.shares), len(self.draft.seats), self.line.width)
        begun, returning, done = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        memories = [StageMemory(self.cost, share) for share in self.line.shares]
        for unit, group in zip(self._unit.tolist(), self._groups, strict=True):
            ranks = list(group.ranks)
            for document, start, stop in group.spans:
                length = int(self.lengths[document])
                if stop - start == length:
                    continue
                for stage, memory in enumerate(memories):
                    keys, gradients = memory.kv_cache_bytes(group, length)
                    begun[stage, unit, ranks] += keys if start == 0 else 0
                    done[stage, unit, ranks] += keys + gradients if start == 0 else 0
                    returning[stage, unit, ranks] += gradients if stop == length else 0
        return Carry(begun.max(axis=2), returning.max(axis=2), done.max(axis=2))


def _size(share: LayerRange) -> tuple[int, bool]:
    return share.stop - share.first, share.ends
