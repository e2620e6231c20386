"""Which tokens a rank holds in a round, and how they move between the attention layout and the linear layout.

`bind` does the index work of a round on the host, once: which rows the rank holds, in which groups it takes part, with
whom it exchanges how many rows. The result is a `Context`, which every layer reads.

A round may have two token layouts (Zeppelin's remapping). Both hold every token once, so `redistribute_tokens` only
moves rows: each rank sends what another shall hold, in one message for all tensors that go together; gradients go back
along the inverse. The rows stay among the ranks of a shard group, which run the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
import torch

from seqloom.dist.expert_parallel import EPGroup
from seqloom.dist.layer_times import TimedTransport
from seqloom.dist.rows import (
    expand_runs,
    inverse_permutation,
    on_device,
    rows_of_move,
    slice_or_index,
    sort_order,
    span_columns,
)
from seqloom.dist.tensor_parallel import RowFunction, TPGroup, bind_tp_group, has_communicator, slice_of, tp_ranks_of
from seqloom.dist.thread_transport import SingleRankTransport
from seqloom.dist.transport import Transport, all_to_all
from seqloom.errors import PlanError, SeqloomError
from seqloom.layout import Layout, Span
from seqloom.layout.move import Move, move_between
from seqloom.plan import Checkpoint, Group, GroupFamily, Plan, Remap, StageMicroBatch

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BoundGroup:
    """A group as one of its ranks sees it.

    The buffer of a ring index holds the rows of its block's ranks, sorted by document and position.

    Attributes:
        ulysses_index, ring_index: of this rank.
        block: ranks of this ring index, the Ulysses communicator; under tensor parallelism they are no run.
        ring_ranks: ranks of this Ulysses index, by ring index.
        spans: of this ring index, sorted by document and position.
        counts: rows of every rank of the block.
        rows: the group's rows in the local buffer; an index int64[rows] when they are not one run.
        order: int64[rows of the block] that sorts the rows of all ranks of the block, one rank after the other, into
            the buffer of the ring index; None when they are sorted already.
        inverse_order: the inverse of `order`.
    """

    group: Group
    ulysses_index: int
    ring_index: int
    block: tuple[int, ...]
    ring_ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    counts: tuple[int, ...]
    rows: slice | torch.Tensor
    order: torch.Tensor | None
    inverse_order: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Rows of this rank."""
        return self.counts[self.ulysses_index]


class Context:
    """One rank's view of a round; a rank without tokens, or in no group, has one too. Immutable.

    Not a dataclass: torch's FSDP looks for tensors in those among a layer's arguments, field by field, at every call.

    Attributes:
        spans: tokens of the local buffer, in the order of its rows: of the linear layout in a round that remaps around
            attention, else of the attention layout.
        positions: int64[tokens], the position of every token in its document.
        documents: int64[tokens], the document of every token.
        groups: those this rank is in, in the order of the work; their rows are of the attention layout.
        attention_redistribute: from the model's tokens to those of attention; None where these are the same.
        mlp_redistribute: from the model's tokens to those of the MLP; None where these are the same.
        node_size: ranks per node; None: not known.
        pieces: for every document of the round that is in pieces, all of its pieces, in order.
        prefixes: how many of its first tokens see each other, for every document of the round of which more than one do
            (prefix language models).
        kv_cache: keys and values of earlier pieces of a document (`attention.KVCache`); None: no document is in pieces.
        tp_group: ranks that share the weights with this one; None: tensor degree 1.
        ep_group: ranks that divide the experts with this one; None: expert degree 1.
        dropout_seed: of the step's random numbers (`models.dropout`); None: nothing is dropped.
        layers: first layer of the stage, and the one behind its last; None: not known.
        saved_attention: results of attention that selective checkpointing keeps (`attention.api.SavedAttention`);
            None: nothing is kept. Set on a copy of the context, for one layer.
        offload: takes what layers save to host memory (`models.offload.Offload`); None: it stays. Set on a copy of the
            context, for the forward of a microbatch.
        times: measures attention and loss (`dist.layer_times`); None: nobody does.
    """

    __slots__ = (
        "_cache",
        "attention_redistribute",
        "documents",
        "dropout_seed",
        "ep_group",
        "groups",
        "kv_cache",
        "layers",
        "mlp_redistribute",
        "node_size",
        "offload",
        "pieces",
        "positions",
        "prefixes",
        "saved_attention",
        "spans",
        "times",
        "tp_group",
        "transport",
        "work",
    )

    def __init__(
        self,
        work: StageMicroBatch,
        blocks: Sequence[Layout],
        transport: Transport,
        device: torch.device,
        node_size: int | None,
        pieces: Mapping[int, tuple[Span, ...]],
        prefixes: Mapping[int, int],
        kv_cache: object | None,
        redistribute: TokenRedistribute | None = None,
        tp_group: TPGroup | None = None,
        dropout_seed: int | None = None,
        layers: tuple[int, int] | None = None,
        ep_group: EPGroup | None = None,
    ) -> None:
        """Do the index work of a rank's groups; see `bind`.

        Args:
            blocks: who holds what in the block of this rank, of every group that it is in.
            redistribute: from the linear to the attention layout; None where these are the same.
        """
        self.work, self.transport, self.node_size, self.layers = work, transport, node_size, layers
        self.ep_group = ep_group
        self.pieces, self.prefixes, self.kv_cache = pieces, prefixes, kv_cache
        self.tp_group, self.dropout_seed = tp_group, dropout_seed
        rank, remaps_attention = transport.rank, work.remap == Remap.ATTENTION
        own = [group for group in work.groups if rank in group.ranks]
        # A document is in one group, so sorting by document is all it takes to join the spans of the groups.
        held = sorted((span, number) for number, layout in enumerate(blocks) for span in layout.spans(rank))
        self.spans = tuple(span for span, _ in held)
        _, starts, stops = span_columns(self.spans)
        lengths = stops - starts
        firsts, owner = np.cumsum(lengths) - lengths, np.array([number for _, number in held], dtype=np.int64)
        self.groups = tuple(
            _bind_group(group, rank, layout, slice_or_index(firsts[mine], lengths[mine]), device)
            for group, layout, mine in zip(own, blocks, (owner == number for number in range(len(own))), strict=True)
        )
        if redistribute is not None and work.linear is not None and remaps_attention:
            self.spans = work.linear.spans(rank)
        self.documents, self.positions = rows_of_spans(self.spans, device)
        self.attention_redistribute = redistribute if remaps_attention else None
        self.mlp_redistribute = None if redistribute is None or remaps_attention else redistribute.reversed()
        self.saved_attention: object | None = None
        self.offload: object | None = None
        self.times = transport.times if isinstance(transport, TimedTransport) else None
        self._cache: dict[Hashable, object] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def tokens(self) -> int:
        """Rows of the local buffer."""
        return len(self.positions)

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors."""
        return self.positions.device

    def checkpoint(self, layer: int) -> Checkpoint:
        """Return what a layer of the model recomputes."""
        work = self.work
        if not work.lighter_layers or work.checkpoint.lighter is None:
            return work.checkpoint
        _, stop = self._stage_layers(f"the last {work.lighter_layers} layers of a stage recompute less")
        return work.checkpoint.lighter if layer >= stop - work.lighter_layers else work.checkpoint

    def offloads(self, layer: int) -> bool:
        """Return whether a layer of the model stores its activations in host memory."""
        if self.offload is None:
            return False
        first, _ = self._stage_layers(f"the first {self.work.offloaded_layers} layers of a stage are offloaded")
        return layer < first + self.work.offloaded_layers

    def _stage_layers(self, what: str) -> tuple[int, int]:
        if self.layers is None:
            raise SeqloomError(
                f"{what} in this round, and the context does not know which these are; bind it with layers=stage.layers"
            )
        return self.layers

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what was built for `key` before, or build it now. The key must name all the value depends on."""
        if key not in self._cache:
            self._cache[key] = build()
        return cast("T", self._cache[key])


def rows_of_spans(spans: Sequence[Span], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of every token of spans and its position there, each int64[tokens]."""
    documents, starts, stops = span_columns(spans)
    lengths = stops - starts
    return on_device(np.repeat(documents, lengths), device), on_device(expand_runs(starts, lengths), device)


def bind(
    work: StageMicroBatch,
    transport: Transport,
    *,
    device: torch.device | str = "cpu",
    node_size: int | None = None,
    shard_groups: Sequence[Sequence[int]] | None = None,
    family: GroupFamily | None = None,
    pieces: Mapping[int, tuple[Span, ...]] | None = None,
    kv_cache: object | None = None,
    tensor: int = 1,
    dropout_seed: int | None = None,
    layers: tuple[int, int] | None = None,
    ep_ranks: tuple[int, ...] = (),
    tp_ranks: tuple[int, ...] = (),
    prefixes: Mapping[int, int] | None = None,
    independent_tokens: bool = False,
) -> Context:
    """Compute what one stage's share of a round means for the rank of `transport`. Communicates nothing.

    Args:
        work: the same on all ranks.
        node_size: ranks per node. Required by a group with a route; others only run faster with it.
        shard_groups: ranks that run the same rounds, among which tokens may move if the work has a linear layout;
            None: all ranks do.
        family: blocks with a communicator; None: none has one.
        pieces: for every document that the plan has in several pieces, all of them, in order.
        kv_cache: an `attention.KVCache`, one for all rounds of a step; needed where the work has such a document.
        tensor: tensor parallel degree of the stage, the inner part of every group's Ulysses axis.
        dropout_seed: another one for every step of training, the same on all ranks; None: nothing is dropped.
        layers: of the stage, as `Stage.layers`; needed where some of them recompute less than the others.
        ep_ranks: that divide the experts of the layers, this rank among them; see `Pipeline.ep_groups`.
        tp_ranks: that divide the weights of the layers; a rank without tokens finds them in no group of the work.
        prefixes: how many of its first tokens see each other in causal attention, by document (prefix language models);
            of those that are not named every token sees only what is before it.
        independent_tokens: spans are any parts of documents, since the stage has no layers in which tokens meet.
    """
    _check_ranks(work, transport, node_size)
    _check_layouts(work, tensor)
    rank, device = transport.rank, torch.device(device)
    found = {} if independent_tokens else _pieces_of_round(work, pieces or {})
    shared = transport, device, node_size, found, _prefixes_of_round(work, prefixes or {}, found), kv_cache
    blocks, tp_group = _block_layouts(work, rank), None
    if tensor > 1:
        ranks, index = tp_ranks_of(work, rank, tensor)
        if len(ranks) == 1 and tp_ranks:
            ranks, index = tp_ranks, tp_ranks.index(rank)
        sliced = slice_of(work, index, tensor)
        tp_group = bind_tp_group(ranks, index, blocks, Context(sliced, _block_layouts(sliced, rank), *shared), family)
    redistribute = _bind_redistribute(work, transport, device, shard_groups, family)
    ep_group = EPGroup(ep_ranks, ep_ranks.index(rank), transport) if len(ep_ranks) > 1 else None
    options = {"redistribute": redistribute, "tp_group": tp_group, "dropout_seed": dropout_seed, "layers": layers}
    return Context(work, blocks, *shared, **options, ep_group=ep_group)


def bind_single_rank(
    lengths: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dropout_seed: int | None = None,
    prefixes: Mapping[int, int] | None = None,
) -> Context:
    """Return the context of whole documents 0, 1, .. of these lengths, packed one after the other on one device.

    For `dropout_seed` and `prefixes` see `bind`.
    """
    wrong = [length for length in lengths if length < 0]
    if wrong:
        raise SeqloomError(f"a document of {wrong[0]} tokens: lengths are 0 or more")
    spans = tuple(Span(number, 0, int(length)) for number, length in enumerate(lengths) if length)
    groups = (Group((0,), 1, 1, spans),) if spans else ()
    work = StageMicroBatch(groups, Checkpoint.NONE)
    return bind(work, SingleRankTransport(), device=device, dropout_seed=dropout_seed, prefixes=prefixes)


def _block_layouts(work: StageMicroBatch, rank: int) -> list[Layout]:
    """Return who in the block of `rank` holds what, for every group it is in.

    A ring index is a group of its own, of the chunks it was dealt.
    """
    layouts = []
    for group in work.groups:
        if rank in group.ranks:
            index = group.ranks.index(rank) // group.ulysses
            block = Group(group.ulysses_groups()[index], group.ulysses, 1, tuple(group.ring_spans(index)))
            layouts.append(block.token_layout())
    return layouts


def _bind_group(group: Group, rank: int, layout: Layout, rows: slice | np.ndarray, device: torch.device) -> BoundGroup:
    ring_index, ulysses_index = divmod(group.ranks.index(rank), group.ulysses)
    block = group.ulysses_groups()[ring_index]
    spans = tuple(sorted(group.ring_spans(ring_index)))
    held = [layout.spans(peer) for peer in block]
    order, inverse_order = sort_order([span for peer_spans in held for span in peer_spans], spans, device)
    return BoundGroup(
        group,
        ulysses_index,
        ring_index,
        block,
        ring_ranks=group.ranks[ulysses_index :: group.ulysses],
        spans=spans,
        counts=tuple(sum(span.tokens for span in peer_spans) for peer_spans in held),
        rows=rows if isinstance(rows, slice) else on_device(rows, device),
        order=order,
        inverse_order=inverse_order,
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowExchange:
    """One rank's part of moving rows from one layout to another: a permuted all-to-all.

    Attributes:
        ranks: of the shard group, ascending.
        collective: whether the shard group has a communicator.
        sends, receives: rows for and from every rank of the shard group, this one included.
        send_order: int64[rows], the rows in the order sent, one receiver after the other; None: as they lie.
        receive_order: int64[rows], sorts the received rows, one sender after the other; None: they are sorted.
    """

    transport: Transport
    ranks: tuple[int, ...]
    collective: bool
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    send_order: torch.Tensor | None
    receive_order: torch.Tensor | None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Return tensors [rows before, width, ...] of one dtype as [rows after, width, ...], in new memory."""
        flat = [tensor.flatten(1) for tensor in tensors]
        if self.send_order is not None:
            flat = [each.index_select(0, self.send_order) for each in flat]
        sent = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0].contiguous()
        width = sent.shape[1]
        received = sent.new_empty((sum(self.receives), width))
        into, out_of = ([rows * width for rows in counts] for counts in (self.receives, self.sends))
        flat_rows = received.view(-1), sent.view(-1)
        all_to_all(self.transport, *flat_rows, into, out_of, self.ranks, collective=self.collective)
        if self.receive_order is not None:
            received = received.index_select(0, self.receive_order)
        parts = received.split([each.shape[1] for each in flat], dim=1)
        return tuple(part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, tensors, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class TokenRedistribute:
    """The exchange from a source to a target layout, and its inverse, which gradients take."""

    to_target: RowExchange
    to_source: RowExchange

    def reversed(self) -> TokenRedistribute:
        """Return the redistribution from target to source."""
        return TokenRedistribute(self.to_source, self.to_target)


def redistribute_tokens(redistribute: TokenRedistribute, *tensors: torch.Tensor) -> Tensors:
    """Move tensors [rows, width, ...] of one dtype together, with autograd. All ranks of the shard group call it."""
    return RowFunction.apply(redistribute.to_target, redistribute.to_source, *tensors)


def run_in_mlp_layout(
    x: torch.Tensor, context: Context | torch.Tensor, mlp: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return `mlp(x)`, computed on the tokens of the linear layout in a round that remaps around the MLP.

    Args:
        x: [tokens, width, ...], rows as in `context.spans`.
        context: of the round; in a compiled layer its opaque handle, and then nothing moves.
        mlp: treats every row independently.

    Returns:
        [tokens, width, ...], rows as those of `x`.
    """
    redistribute = None if isinstance(context, torch.Tensor) else context.mlp_redistribute
    if redistribute is None:
        return mlp(x)
    (inside,) = redistribute_tokens(redistribute, x)
    return redistribute_tokens(redistribute.reversed(), mlp(inside))[0]


def _bind_redistribute(
    work: StageMicroBatch,
    transport: Transport,
    device: torch.device,
    shard_groups: Sequence[Sequence[int]] | None,
    family: GroupFamily | None,
) -> TokenRedistribute | None:
    """Return this rank's redistribution from linear to attention layout; None where its shard group moves nothing."""
    if work.linear is None:
        return None
    rank, everyone = transport.rank, tuple(range(transport.ranks))
    shard_group = tuple(sorted(next((each for each in shard_groups or (everyone,) if rank in each), (rank,))))
    near = tuple(group for group in work.groups if not set(group.ranks).isdisjoint(shard_group))
    attention = StageMicroBatch(near, work.checkpoint).attention_layout().restrict(shard_group)
    linear = work.linear.restrict(shard_group)
    move = _move_to_attention(linear, attention, shard_group, rank)
    if not move.remote.any():
        return None
    taken, sends = _rows_by_peer(move, linear, rank, shard_group, sends=True)
    placed, receives = _rows_by_peer(move, attention, rank, shard_group, sends=False)
    take, place = (
        None if np.array_equal(rows, np.arange(len(rows))) else on_device(rows, device) for rows in (taken, placed)
    )
    ends = transport, shard_group, has_communicator(shard_group, family)
    return TokenRedistribute(
        RowExchange(*ends, sends, receives, take, None if place is None else inverse_permutation(place)),
        RowExchange(*ends, receives, sends, place, None if take is None else inverse_permutation(take)),
    )


def _rows_by_peer(
    move: Move, layout: Layout, rank: int, shard_group: tuple[int, ...], *, sends: bool
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the rows of this rank's end of a move, one peer after the other, and how many each peer has."""
    peers, starts, lengths = rows_of_move(move, layout, rank, sends=sends)
    counts = np.bincount(np.searchsorted(shard_group, peers), weights=lengths, minlength=len(shard_group))
    return expand_runs(starts, lengths), tuple(int(count) for count in counts)


def _move_to_attention(linear: Layout, attention: Layout, shard_group: tuple[int, ...], rank: int) -> Move:
    """Return the move between the layouts of a shard group; refuse layouts that do not hold the same tokens once."""
    if linear.axes != 1:
        raise SeqloomError(f"a linear layout with {linear.axes} axes: it holds whole tokens; use one axis")
    held, wanted = (int(layout.sizes.sum()) for layout in (linear, attention))
    try:
        if held == wanted:  # and every token that attention wants is there: then no token is there twice
            return move_between(linear, attention)
    except PlanError:
        pass
    run = len(shard_group) > 1 and shard_group == tuple(range(shard_group[0], shard_group[-1] + 1))
    ranks = f"{shard_group[0]} to {shard_group[-1]}" if run else ", ".join(map(str, shard_group))
    raise SeqloomError(
        f"the linear layout puts {held} tokens on ranks {ranks}, which hold {wanted} in attention, or other "
        f"ones: a remap leaves every token once, on ranks that share parameter shards, as these do with rank {rank}; "
        "let the linear layout spread what they hold, leave it out, or shard parameters over more ranks"
    )


def pieces_of_plan(plan: Plan) -> dict[int, tuple[Span, ...]]:
    """Return all pieces, in order, of every document that the plan splits into several (Seq1F1B)."""
    found: dict[int, list[Span]] = {}
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            for span in current.by_stage[0].spans():  # all stages of a pipeline work on the same tokens
                if span.tokens < plan.documents[span.document]:
                    found.setdefault(span.document, []).append(span)
    return {document: tuple(sorted(spans)) for document, spans in found.items()}


def _pieces_of_round(work: StageMicroBatch, pieces: Mapping[int, tuple[Span, ...]]) -> dict[int, tuple[Span, ...]]:
    """Return the pieces of those documents of a round that are in several; refuse inconsistent ones."""
    found: dict[int, tuple[Span, ...]] = {}
    documents: set[int] = set()
    for span in work.spans():
        if span.document in documents:
            raise SeqloomError(
                f"document {span.document} is twice in one round's work; a document, or a piece of one, belongs to one "
                "group of a round: give the other piece to another round"
            )
        documents.add(span.document)
        every = pieces.get(span.document, ())
        if len(every) < 2 and span.start > 0:
            raise SeqloomError(
                f"document {span.document} from token {span.start} on: attention needs the keys of its earlier pieces; "
                "run the plan with bind_plan and run_step, or bind with pieces_of_plan(plan) and a kv_cache"
            )
        if len(every) < 2:
            continue
        edges = [0, *(piece.stop for piece in every)]
        given = [(piece.start, piece.stop) for piece in every]
        if given != list(pairwise(edges)) or any(piece.tokens < 1 for piece in every):
            raise SeqloomError(
                f"document {span.document} in pieces {given}: pieces begin at token 0 and follow each other without "
                "gaps; give all pieces of the document in order, as pieces_of_plan does"
            )
        if span not in every:
            raise SeqloomError(
                f"document {span.document} is at tokens {span.start} to {span.stop} in this round, its pieces are "
                f"{given}: give the pieces of the plan that the round belongs to"
            )
        found[span.document] = every
    return found


def _prefixes_of_round(
    work: StageMicroBatch, prefixes: Mapping[int, int], pieces: Mapping[int, tuple[Span, ...]]
) -> dict[int, int]:
    """Return the prefixes of the documents of a round that are longer than one token; refuse impossible ones."""
    found = {}
    for span in work.spans():
        prefix, whole = prefixes.get(span.document, 0), span.document not in pieces
        first = span.stop if whole else pieces[span.document][0].stop
        if not hasattr(prefix, "__index__") or prefix < 0 or (whole and prefix > first):
            raise SeqloomError(
                f"a prefix of {prefix} tokens for document {span.document}, which has {span.stop}: it is how many of "
                f"its first tokens see each other, a whole number from 0 to {span.stop}"
            )
        if prefix > first:
            raise SeqloomError(
                f"a prefix of {prefix} tokens for document {span.document}, whose first piece ends at token {first}: "
                "the keys of later pieces do not exist yet when it is computed; plan whole documents, or make the "
                "first piece as long as the prefix"
            )
        if prefix > 1:
            found[span.document] = int(prefix)
    return found


def _check_ranks(work: StageMicroBatch, transport: Transport, node_size: int | None) -> None:
    """Refuse groups and routes that the ranks of a transport cannot run."""
    for group in work.groups:
        name = f"a group on ranks {group.ranks} with ulysses {group.ulysses} x ring {group.ring}"
        advice = f"bind a plan made for {transport.ranks} ranks, or start at least {max(group.ranks, default=0) + 1}"
        _check_known(name, group.ranks, transport, advice)
        if len(set(group.ranks)) < group.degree or group.ulysses * group.ring != group.degree or not group.ranks:
            raise SeqloomError(f"{name}: it needs ulysses x ring different ranks; list every rank once")
        for block in group.ulysses_groups():
            if block != tuple(range(block[0], block[0] + group.ulysses)):
                raise SeqloomError(
                    f"{name}: ranks {block} exchange heads and must be an ascending run, "
                    f"for example {tuple(range(min(block), min(block) + group.ulysses))}"
                )
        if group.route is None:
            continue
        name = f"a group on ranks {group.ranks} routed through proxies {group.route.proxies}"
        _check_known(name, group.route.proxies, transport, "choose proxies among them, or leave the route out")
        if node_size is None:
            raise SeqloomError(
                f"{name}: which ranks share a node is not known; bind with node_size=..., or leave the route out"
            )


def _check_known(name: str, ranks: Sequence[int], transport: Transport, advice: str) -> None:
    beyond = [rank for rank in ranks if not 0 <= rank < transport.ranks]
    if beyond:
        raise SeqloomError(
            f"{name}: rank {beyond[0]} is not among the {transport.ranks} ranks of the transport; {advice}"
        )


def _check_layouts(work: StageMicroBatch, tensor: int) -> None:
    """Refuse an attention layout other than that of the groups, and what tensor parallelism does not allow."""
    if work.attention is not None and work.attention != (derived := replace(work, attention=None).attention_layout()):
        raise SeqloomError(
            f"the attention layout of the work, {work.attention}, is not the one that its groups give, {derived}: "
            "groups deal their tokens to ranks in one way, which their kernels and rings rely on; leave the attention "
            "layout out, and give tokens other places in the linear layout"
        )
    if tensor == 1:
        return
    for group in work.groups:
        if tensor < 1 or group.ulysses % tensor:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with ulysses {group.ulysses}: TP groups "
                f"are the inner part of the Ulysses axis; use a degree that divides {group.ulysses}"
            )
        if group.route is not None:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with a route: weight slices exchange keys "
                "by themselves, from rank to rank; leave the route out, or use tensor degree 1"
            )
    if work.linear is not None:
        raise SeqloomError(
            f"tensor degree {tensor} for work with a linear layout: a TP group computes its linear layers together, on "
            "the tokens it has in attention; leave the linear layout out, or use tensor degree 1"
        )
