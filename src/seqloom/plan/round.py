"""A round: the groups that work side by side in one forward and backward, for every stage of a pipeline.

A group is ranks that share the tokens and the heads of some spans, by Ulysses (heads) and ring (positions). Ulysses is
the inner axis. With ulysses 4 and ring 2 on ranks 0-7:

    ring 0:  ranks 0 1 2 3      each row exchanges heads for tokens among its four ranks,
    ring 1:  ranks 4 5 6 7      each column passes keys and values around
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.layout import Column, Layout, Span, deal_intervals
from seqloom.layout.route import Route


class Method(StrEnum):
    """How ring indices share keys and values: passed around in steps, or gathered in one exchange."""

    RING = "ring"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks in order, `ulysses` x `ring`, and the spans they work on.

    Rank i of the group has Ulysses index `i % ulysses` and ring index `i // ulysses`. `method` and `route` are about
    the ring: how keys and values are shared, and how they cross between nodes (None: each through its own NIC). With
    `latent`, latents travel in their place, and are kept of a document in pieces; every rank expands them for its heads
    (latent attention, MLA). With `states`, layers that scan pass states from rank to rank, instead of exchanging tokens
    for heads.
    """

    ranks: tuple[int, ...]
    ulysses: int
    ring: int
    spans: tuple[Span, ...]
    method: Method = Method.RING
    route: Route | None = None
    latent: bool = False
    states: bool = False

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that meet in the group's exchanges: its own, and the proxies of its route."""
        if self.route is None:
            return self.ranks
        return (*self.ranks, *(rank for rank in self.route.proxies if rank not in self.ranks))

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def order_key(self, node_size: int) -> int:
        """Return when the group runs among those of its round: 0 between nodes, 1 inside a node, 2 on one rank."""
        if len(self.ranks) == 1:
            return 2
        return int(min(self.ranks) // node_size == max(self.ranks) // node_size)

    @property
    def tokens(self) -> int:
        """Tokens of all spans."""
        return sum(stop - start for _, start, stop in self.spans)

    def ulysses_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every ring index: the Ulysses communicators of the group."""
        return tuple(self.ranks[k : k + self.ulysses] for k in range(0, len(self.ranks), self.ulysses))

    def token_layout(self) -> Layout:
        """Return who holds which tokens outside attention, one axis.

        Without a ring the spans are packed one after the other and every rank gets an equal run of tokens
        (some one more). With a ring the spans are first dealt to the ring indices in zigzag, see `ring_spans`.
        """
        return Layout(*self.token_columns())

    def token_columns(self) -> list[Column]:
        """Return rank, item, start and stop of the boxes of `token_layout`, in no order: cheap to join with others."""
        dealt = [_deal(self.ring_spans(k), block) for k, block in enumerate(self.ulysses_groups())]
        return [np.concatenate(columns) for columns in zip(*dealt, strict=True)]

    def head_layout(self, heads: int, kv_heads: int | None = None) -> Layout:
        """Return who holds which tokens x heads in attention, after the Ulysses exchange, two axes.

        Every rank holds all tokens of its ring index, and an equal run of the query heads (the first ranks one more).
        With `kv_heads` return the key and value heads instead: those that the rank's query heads read. A key/value head
        is replicated only on ranks whose query heads share it.
        """
        if not 1 <= self.ulysses <= heads:
            raise PlanError(f"ulysses {self.ulysses} with {heads} heads: every rank needs a head; use ulysses {heads}")
        if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
            raise PlanError(f"{kv_heads} kv heads for {heads} heads: kv heads must divide the heads")
        boxes = []
        for k, block in enumerate(self.ulysses_groups()):
            spans = self.ring_spans(k)
            for rank, (low, high) in zip(block, even_ranges(heads, self.ulysses), strict=True):
                if kv_heads is not None:
                    shared = heads // kv_heads
                    low, high = low // shared, -(-high // shared)
                boxes += [(rank, document, start, stop, low, high) for document, start, stop in spans]
        return Layout.of(boxes) if boxes else Layout.empty(axes=2)

    def ring_spans(self, index: int) -> list[Span]:
        """Return the spans of one ring index: of every span, chunks `index` and `2 * ring - 1 - index`.

        A causal mask makes late chunks expensive and early ones cheap; pairing them levels the work. ring 2:

            chunk     0 1 2 3
            ring 0    x     x
            ring 1      x x
        """
        if self.ring == 1:
            return list(self.spans)
        chosen = []
        for document, start, stop in self.spans:
            chunks = even_ranges(stop - start, 2 * self.ring)
            for low, high in (chunks[index], chunks[2 * self.ring - 1 - index]):
                if high > low:
                    chosen.append(Span(document, start + low, start + high))
        return chosen


class Checkpoint(StrEnum):
    """Activation checkpointing: what a round stores until its backward.

    none: everything. selective: inputs of layers, attention outputs and log-sum-exp. full: inputs of layers
    only. stage: the input of the whole stage only, which is run forward again as one. profile: whatever the
    profile's constants were measured with.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    STAGE = "stage"
    PROFILE = "profile"

    @property
    def lighter(self) -> Checkpoint | None:
        """What single layers may do instead to recompute less; None: nothing."""
        return {Checkpoint.FULL: Checkpoint.SELECTIVE, Checkpoint.SELECTIVE: Checkpoint.NONE}.get(self)


class Remap(StrEnum):
    """Where tokens change between the attention and the linear layout, if these differ.

    attention: around it; everything else sees the linear layout. mlp: around it; only it sees the linear layout.
    """

    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class StageMicroBatch:
    """One stage's share of a round.

    A rank may be in several groups; it runs them in the order of `groups`, in which all ranks agree: slow links first.
    The layouts say who holds which tokens in attention and in linear layers; None means that every rank holds what its
    groups give it (`Group.token_layout`). The last `lighter_layers` layers of the stage recompute less, as
    `checkpoint.lighter` says: backward begins with them and frees what they store before others recompute. What the
    first `offloaded_layers` layers store is in host memory from their forward to their backward: they wait longest.
    """

    groups: tuple[Group, ...]
    checkpoint: Checkpoint
    attention: Layout | None = None
    linear: Layout | None = None
    remap: Remap = Remap.ATTENTION
    offloaded_layers: int = 0
    lighter_layers: int = 0

    @property
    def offload(self) -> bool:
        """Whether some activations are in host memory."""
        return self.offloaded_layers > 0

    def spans(self) -> Iterator[Span]:
        """Return the spans of all groups, in order."""
        for group in self.groups:
            yield from group.spans

    def attention_layout(self) -> Layout:
        """Return who holds which tokens when attention starts."""
        if self.attention is not None:
            return self.attention
        if not self.groups:
            return Layout.empty()
        parts = [group.token_columns() for group in self.groups]
        return Layout(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def linear_layout(self) -> Layout:
        """Return who holds which tokens in linear layers."""
        return self.attention_layout() if self.linear is None else self.linear


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch: a `StageMicroBatch` for every stage, all on the same spans."""

    by_stage: tuple[StageMicroBatch, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all stages."""
        return tuple(group for work in self.by_stage for group in work.groups)


def sort_groups(groups: Iterable[Group], node_size: int) -> tuple[Group, ...]:
    """Sort the groups of a round by `Group.order_key`, slow links first; others keep their order."""
    return tuple(sorted(groups, key=lambda group: group.order_key(node_size)))


def even_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut `0 .. total - 1` into `parts` runs of equal length, the first ones one longer."""
    base, extra = divmod(total, parts)
    cuts = [k * base + min(k, extra) for k in range(parts + 1)]
    return list(pairwise(cuts))


def _deal(spans: Sequence[Span], ranks: Sequence[int]) -> tuple[Column, Column, Column, Column]:
    """Pack `spans` one after the other and give each rank an equal run of the tokens: rank, item, start, stop.

    Rank k begins at token k / ranks of the whole, rounded up. So what neighbours hold together, two by two or four by
    four, is what half or a quarter of the ranks would be dealt: tensor ranks hold their tokens as one Ulysses rank.
    """
    if not spans:
        none = np.empty(0, dtype=np.int64)
        return none, none, none, none
    item, start, stop = np.array(spans, dtype=np.int64).T
    ends = -(-np.arange(1, len(ranks) + 1, dtype=np.int64) * (stop - start).sum() // len(ranks))
    return deal_intervals(item, start, stop, np.asarray(ranks, dtype=np.int64), ends)
