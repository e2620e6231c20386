"""Dynamic context parallelism of Megatron-Core: groups for its `get_groups_and_subsamples`, and what a rank packs.

Releases from 0.16, whose samples run one by one (hybrid context parallelism):

    wrapper = HybridCPDataLoaderWrapper(iterator, config)              # of megatron.core.datasets.data_schedule
    wrapper.cp_balancing_scheduler = HybridCPScheduler(cost, wrapper.cp_balancing_scheduler)

The development branch, whose groups pack their samples (dynamic context parallelism):

    class Scheduler(DefaultDynamicCPScheduler):                        # of megatron.core.datasets.data_schedule
        def get_groups_and_subsamples(self, sample_id_seqlens):
            return dynamic_cp_groups(sample_id_seqlens, cost, max_seqlen_per_dp_cp_rank=self.max_seqlen_per_dp_cp_rank)

    scheduler_map["default_dynamic_cp"] = Scheduler

Their rules: every sample is in one micro-batch; in each micro-batch every rank has samples; ranks with the same list
are a group, of neighbours, whose size is a power of two that divides its first rank, or all ranks; no rank has more
tokens than its cap, of a pack or of a sample. With interleaved pipelines the number of micro-batches is a multiple of
their group's.

Candidates are Megatron's own schedule, which gives a long document the least ranks that hold it, and schedules under
limits of time, where it gets as many ranks as the limit asks for. In the fastest ones, by the cost model, sequences are
moved while that saves time: the answer is never slower than Megatron's own. Nothing of Megatron is imported, nor torch,
except by `packed_seq_params`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.errors import SeqloomError
from seqloom.planners.published.megatron import group_sizes, least_size, micro_batches

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

Schedule = Sequence[Sequence[Sequence[int]]]
"""`schedule[micro-batch][rank]`: the ids of the samples of a rank's group."""

LIMITS, LIMITS_RATIO = 12, 0.8
"""Time limits that are tried for groups, and the ratio of each to the one before."""
IMPROVED = 3
"""Schedules in which sequences are moved then: the fastest ones."""
CHANGES = 10_000
"""Moves that an improvement looks at; a count, so that the same lengths have the same answer anywhere."""


def dynamic_cp_groups(
    sample_id_seqlens: Sequence[tuple[int, int]],
    cost: CostModel,
    *,
    max_seqlen_per_dp_cp_rank: int,
    min_cp_size: int = 1,
    microbatch_group_size_per_vp_stage: int | None = None,
    packed: bool = True,
    rival: Schedule = (),
) -> list[list[list[int]]]:
    """Return `groups[micro-batch][rank]`, lists of sample ids: those of a rank's group.

    Args:
        sample_id_seqlens: (id, padded length) of every sample of the global batch.
        cost: prices sequences on groups; its ranks are all of data times context parallelism.
        max_seqlen_per_dp_cp_rank: tokens that a rank may have at a time.
        min_cp_size: the smallest group.
        microbatch_group_size_per_vp_stage: of interleaved pipelines; None: any number of micro-batches.
        packed: whether the samples of a group are one pack; otherwise they run one by one, and the cap holds each.
        rival: a schedule of the same rules, another candidate.
    """
    ranks, multiple = cost.ranks, microbatch_group_size_per_vp_stage or 1
    ids = [sample for sample, _ in sample_id_seqlens]
    lengths = np.array([length for _, length in sample_id_seqlens], dtype=np.int64)
    _check(ids, lengths, max_seqlen_per_dp_cp_rank, ranks, min_cp_size, multiple)
    menu = [size for size in group_sizes(ranks) if size >= min_cp_size]
    prices = _Prices.of(cost, lengths, menu, max_seqlen_per_dp_cp_rank, packed=packed)
    published = [
        [_Group(len(group.ranks), [*group.documents]) for group in batch]
        for batch in micro_batches(lengths, max_seqlen_per_dp_cp_rank, ranks)
    ]
    found = [_legal(published, prices)]
    longest = max(prices.group_ns(group) for batch in found[0] for group in batch)
    limits = [round(longest * LIMITS_RATIO**power) for power in range(LIMITS)]
    found += [_within(limit, prices, fill=fill) for limit in limits for fill in (False, True)]
    if rival:
        found.append(_from_ranks(rival, ids))
    multiples = (_multiple(each, prices, multiple) for each in found)
    found = sorted((each for each in multiples if each is not None), key=prices.step_ns)
    if not found:
        raise SeqloomError(
            f"{len(ids)} samples for micro-batches in multiples of {multiple}, of {max_seqlen_per_dp_cp_rank} tokens "
            "per rank: too few of them can share or be alone; use a larger global batch, or raise "
            "max_seqlen_per_dp_cp_rank"
        )
    found += [_improved(each, prices) for each in found[:IMPROVED]]
    best = min(found, key=prices.step_ns)
    return [_by_rank(batch, ids) for batch in best]


@dataclass(frozen=True, slots=True, eq=False)
class HybridCPScheduler:
    """Takes the place of a `BalancedCPScheduler` of Megatron-Core 0.16, and is never slower by the cost model.

    Attributes:
        cost: prices sequences on groups; its ranks are all of data times context parallelism.
        host: the scheduler that it replaces: its cap counts, and its schedule is a candidate.
    """

    cost: CostModel
    host: Any

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Return lengths and ids of the samples that each rank runs, `[micro-batch][rank]`, as the host does."""
        if self.cost.ranks != self.host.total_hdp_gpus:
            raise SeqloomError(
                f"a cost model of {self.cost.ranks} ranks for {self.host.total_hdp_gpus} of data times context "
                "parallelism: name a cluster of as many"
            )
        try:
            _, rival = self.host.get_groups_and_subsamples(sample_id_seqlens, config)
        except AssertionError:  # a sample that needs more than the largest power of two below the ranks
            rival = ()
        cap = self.host.max_seq_len_per_rank
        ids = dynamic_cp_groups(sample_id_seqlens, self.cost, max_seqlen_per_dp_cp_rank=cap, packed=False, rival=rival)
        length_of = dict(sample_id_seqlens)
        return [[[length_of[sample] for sample in listed] for listed in batch] for batch in ids], ids


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """What Megatron's `PackedSeqParams` of a rank's micro-batch hold, as plain data; `packed_seq_params` makes them.

    Attributes:
        sample_ids: the packed samples, in order.
        cp_ranks: ranks of the group, which `cp_group` has.
        cu_seqlens_q, cu_seqlens_kv: where sequences begin and end without padding, in the whole pack.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: where they do with padding.
        max_seqlen_q, max_seqlen_kv: the longest, with padding.
    """

    sample_ids: tuple[int, ...]
    cp_ranks: tuple[int, ...]
    local_cp_size: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_kv: tuple[int, ...]
    cu_seqlens_q_padded: tuple[int, ...]
    cu_seqlens_kv_padded: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_kv: int
    qkv_format: str = "thd"
    cp_partition_mode: str = "zigzag"


def packed_sequences(
    groups: Sequence[Sequence[int]],
    rank: int,
    lengths: dict[int, int],
    padded: dict[int, int] | None = None,
) -> PackedSequences:
    """Return what a rank packs in a micro-batch of `dynamic_cp_groups`.

    Args:
        groups: of the micro-batch, by rank.
        lengths: tokens of every sample.
        padded: tokens with padding; None: without any. On `c` > 1 ranks they are multiples of 2c, two chunks a rank.
    """
    samples, padded = groups[rank], padded or lengths
    members = tuple(other for other, listed in enumerate(groups) if listed[0] == samples[0])
    for sample in samples:
        if padded[sample] < lengths[sample] or (len(members) > 1 and padded[sample] % (2 * len(members))):
            raise SeqloomError(
                f"sample {sample} of {lengths[sample]} tokens is padded to {padded[sample]} on {len(members)} ranks: a "
                f"padded length is at least the length and a multiple of {2 * len(members)}; pad to "
                f"{-(-lengths[sample] // (2 * len(members))) * 2 * len(members)}"
            )
    plain = (0, *accumulate(lengths[sample] for sample in samples))
    whole = (0, *accumulate(padded[sample] for sample in samples))
    longest = max(padded[sample] for sample in samples)
    return PackedSequences(
        tuple(samples), members, len(members), plain, plain, whole, whole, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def packed_seq_params(packed: PackedSequences, cp_group: Any = None, device: Any = "cpu") -> PackedSeqParams:
    """Return the `PackedSeqParams` of the installed Megatron-Core for a pack.

    Args:
        cp_group: the process group of the ranks `packed.cp_ranks`; None: Megatron's own.
        device: of the tensors: that of queries and keys.
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    known = {each.name for each in fields(PackedSeqParams)}
    values = {each.name: getattr(packed, each.name) for each in fields(packed) if each.name in known}
    values = {
        name: torch.tensor(value, dtype=torch.int32, device=device) if isinstance(value, tuple) else value
        for name, value in values.items()
    }
    return PackedSeqParams(**values, cp_group=cp_group)


# -- micro-batches under construction -----------------------------------------------


@dataclass(slots=True, eq=False)
class _Group:
    """Documents on so many ranks."""

    size: int
    documents: list[int] = field(default_factory=list)


Batches = list[list[_Group]]


@dataclass(frozen=True, slots=True, eq=False)
class _Prices:
    """What documents take on groups of each size.

    Attributes:
        ns: of a document by size.
        fixed: ns of a group before any document, by size.
        lengths, capacity: tokens of documents, and of a rank at most.
        menu, ranks: the legal sizes of groups, of which the last is all ranks.
        packed: whether a group's documents are one pack.
    """

    ns: dict[int, list[int]]
    fixed: dict[int, int]
    lengths: list[int]
    capacity: int
    menu: list[int]
    ranks: int
    packed: bool = True

    @classmethod
    def of(
        cls, cost: CostModel, lengths: np.ndarray, menu: list[int], capacity: int, *, packed: bool = True
    ) -> _Prices:
        """Price documents as rings, Megatron's exchange of keys and values, without recomputation where that fits."""
        tables = cost.tables(lengths, cost.policies[0], [GroupShape(1, size) for size in menu])
        ns = {size: tables.cost[:, row].max(axis=0).tolist() for row, size in enumerate(menu)}
        fixed = {size: int(tables.fixed[:, row].max()) for row, size in enumerate(menu)}
        if not packed:  # each document pays for what a pack pays once
            ns = {size: [each + fixed[size] for each in ns[size]] for size in menu}
            fixed = dict.fromkeys(menu, 0)
        return cls(ns, fixed, lengths.tolist(), capacity, menu, cost.ranks, packed)

    def group_ns(self, group: _Group) -> int:
        """Time of a group."""
        return self.fixed[group.size] + sum(self.ns[group.size][i] for i in group.documents)

    def tokens(self, documents: list[int]) -> int:
        """Tokens that the ranks of a group hold at a time."""
        held = (self.lengths[i] for i in documents)
        return sum(held) if self.packed else max(held)

    def fits(self, load: _Load, i: int, leaving: int | None = None) -> bool:
        """Return whether a group may take a document, for another one or for none."""
        held = load.tokens - (0 if leaving is None else self.lengths[leaving]) if self.packed else 0
        return held + self.lengths[i] <= self.capacity * load.group.size

    def step_ns(self, batches: Batches) -> int:
        """Time of all micro-batches, one after the other: each waits for its slowest group."""
        return sum(max(self.group_ns(group) for group in batch) for batch in batches)

    def least(self, documents: list[int]) -> int:
        """Return the smallest legal size for documents."""
        return least_size(self.tokens(documents), self.capacity, self.menu)


def _within(limit: int, prices: _Prices, *, fill: bool) -> Batches:
    """Return micro-batches whose groups take `limit` ns or less, where the largest group can.

    Each document has the least ranks on which it takes no longer. Longest first, it joins the first group that has
    room, of its size or, with `fill`, of a larger one; else it opens one. Micro-batches take the largest groups first.
    """
    groups: list[_Load] = []
    for i in sorted(range(len(prices.lengths)), key=lambda i: (-prices.lengths[i], i)):
        tokens = prices.lengths[i]
        able = [size for size in prices.menu if size * prices.capacity >= tokens]
        least = next((size for size in able if prices.fixed[size] + prices.ns[size][i] <= limit), able[-1])
        for load in groups:
            size = load.group.size
            joins = size == least or (fill and size > least)
            if joins and load.ns + prices.ns[size][i] <= limit and prices.fits(load, i):
                break
        else:
            load = _Load(_Group(least), prices.fixed[least], 0)
            groups.append(load)
        load.group.documents.append(i)
        load.ns, load.tokens = load.ns + prices.ns[load.group.size][i], load.tokens + tokens
    return _legal([[load.group for load in groups]], prices)


def _legal(batches: Batches, prices: _Prices) -> Batches:
    """Round sizes up to legal ones, defer groups that do not fit any more, and leave no rank without documents."""
    legal: Batches = []
    for batch in batches:
        waiting = [
            _Group(max(prices.least(each.documents), least_size(each.size, 1, prices.menu)), each.documents)
            for each in batch
        ]
        while waiting:
            waiting.sort(key=lambda group: (-group.size, -prices.group_ns(group)))
            taken: list[_Group] = []
            left = []
            for group in waiting:
                fits = sum(each.size for each in taken) + group.size <= prices.ranks
                (taken if fits else left).append(group)
            legal.append(_spread(taken, prices))
            waiting = left
    return legal


def _spread(groups: list[_Group], prices: _Prices) -> list[_Group]:
    """Enlarge groups until no rank is free: the slowest that can double; else all ranks are one group."""
    groups = [_Group(group.size, group.documents) for group in groups]
    while (free := prices.ranks - sum(group.size for group in groups)) > 0:
        able = [group for group in groups if group.size <= free and 2 * group.size in prices.menu]
        if not able:
            return [_Group(prices.ranks, [i for group in groups for i in group.documents])]
        smallest = min(group.size for group in able)
        able = [group for group in able if group.size == smallest]
        max(able, key=prices.group_ns).size *= 2
    return groups


def _multiple(batches: Batches, prices: _Prices, multiple: int) -> Batches | None:
    """Split the slowest micro-batches that have two documents, until their number is a multiple; None: none is left."""
    batches = [*batches]
    while len(batches) % multiple:
        able = [batch for batch in batches if sum(len(group.documents) for group in batch) > 1]
        if not able:
            return None
        slowest = max(able, key=lambda batch: max(prices.group_ns(group) for group in batch))
        batches.remove(slowest)
        documents = sorted((i for group in slowest for i in group.documents), key=lambda i: -prices.lengths[i])
        for half in (documents[::2], documents[1::2]):
            lengths = np.array([prices.lengths[i] for i in half], dtype=np.int64)
            packed = micro_batches(lengths, prices.capacity, prices.ranks)
            groups = [[_Group(len(each.ranks), [half[i] for i in each.documents]) for each in one] for one in packed]
            batches += _legal(groups, prices)
    return batches


def _improved(batches: Batches, prices: _Prices) -> Batches:
    """Move documents out of the slowest group of a micro-batch, or exchange them, while the step gets faster."""
    loads = [
        [
            _Load(_Group(group.size, [*group.documents]), prices.group_ns(group), prices.tokens(group.documents))
            for group in batch
        ]
        for batch in batches
    ]
    left, gained = CHANGES, True
    while gained and left > 0:
        gained = False
        for here in loads:
            slow = max(here, key=lambda load: load.ns)
            for there in loads:
                for other in there:
                    if other is not slow and left > 0 and not gained:
                        looked, gained = _exchange(slow, other, here, there, prices)
                        left -= looked
    return [[load.group for load in batch] for batch in loads]


@dataclass(slots=True, eq=False)
class _Load:
    """A group with its time and its tokens."""

    group: _Group
    ns: int
    tokens: int


def _exchange(slow: _Load, other: _Load, here: list[_Load], there: list[_Load], prices: _Prices) -> tuple[int, bool]:
    """Move a document to another group, or exchange it for a shorter one; return how many were tried, and success."""
    rest_here = max((load.ns for load in here if load is not slow and load is not other), default=0)
    rest_there = max((load.ns for load in there if load is not slow and load is not other), default=0)
    before = slow.ns if here is there else slow.ns + max(rest_there, other.ns)
    giving, taking = prices.ns[slow.group.size], prices.ns[other.group.size]
    looked = 0
    alone: list[int | None] = [None] if len(slow.group.documents) > 1 else []
    for i in slow.group.documents:
        for j in (*alone, *other.group.documents):
            looked += 1
            grows = prices.lengths[i] - (0 if j is None else prices.lengths[j])
            if grows <= 0 or not prices.fits(other, i, j):
                continue
            slow_ns = slow.ns - giving[i] + (0 if j is None else giving[j])
            other_ns = other.ns + taking[i] - (0 if j is None else taking[j])
            after = max(rest_here, slow_ns, other_ns)
            if here is not there:
                after = max(rest_here, slow_ns) + max(rest_there, other_ns)
            if after < before:
                _swap(slow.group, other.group, i, j)
                slow.ns, other.ns = slow_ns, other_ns
                slow.tokens, other.tokens = slow.tokens - grows, other.tokens + grows
                return looked, True
    return looked, False


def _swap(giver: _Group, taker: _Group, i: int, j: int | None) -> None:
    """Give a document, for another one or for none."""
    giver.documents.remove(i)
    taker.documents.append(i)
    if j is not None:
        taker.documents.remove(j)
        giver.documents.append(j)


def _by_rank(batch: list[_Group], ids: list[int]) -> list[list[int]]:
    """Return the ids of every rank's group; the largest groups come first, so each begins at a multiple of its size."""
    return [
        [ids[i] for i in sorted(group.documents)]
        for group in sorted(batch, key=lambda group: (-group.size, min(group.documents)))
        for _ in range(group.size)
    ]


def _from_ranks(schedule: Schedule, ids: list[int]) -> Batches:
    """Return the groups of a schedule: ranks with the same list are one."""
    place = {sample: i for i, sample in enumerate(ids)}
    found = [Counter(tuple(place[sample] for sample in listed) for listed in batch) for batch in schedule]
    return [[_Group(size, [*documents]) for documents, size in batch.items()] for batch in found]


def _check(ids: list[int], lengths: np.ndarray, capacity: int, ranks: int, smallest: int, multiple: int) -> None:
    """Refuse a batch that no schedule of these rules holds."""
    if len({*ids}) != len(ids) or not ids:
        raise SeqloomError(f"{len(ids)} samples with {len({*ids})} ids: give one or more, each with its own id")
    longest, shortest = int(lengths.max()), int(lengths.min())
    if shortest < 1 or longest > capacity * ranks:
        raise SeqloomError(
            f"a sample of {shortest if shortest < 1 else longest} tokens for {ranks} ranks of {capacity}: samples have "
            f"1 to {capacity * ranks} tokens; raise max_seqlen_per_dp_cp_rank, or leave the longest out"
        )
    if smallest not in group_sizes(ranks):
        raise SeqloomError(
            f"min_cp_size {smallest} on {ranks} ranks: a group has {', '.join(map(str, group_sizes(ranks)))}"
        )
    if len(ids) < multiple:
        raise SeqloomError(
            f"{len(ids)} samples for micro-batches in multiples of {multiple}: each has one or more; use a larger "
            "global batch, or a smaller microbatch_group_size_per_vp_stage"
        )
