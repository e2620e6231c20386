"""Rules about tokens: every token once, in causal order, within memory, and where explicit layouts put it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from seqloom.errors import violation
from seqloom.layout.layout import Layout, merge_touching
from seqloom.layout.move import move_between
from seqloom.plan.limits import mixed_capacity
from seqloom.plan.round import Method, StageMicroBatch
from seqloom.plan.rules.structure import place, stage_batches, stage_groups, whole_numbers

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan


def spans(plan: Plan) -> None:
    """Every span lies inside a document of the plan."""
    lengths, count = plan.documents, len(plan.documents)
    for where, _, group in stage_groups(plan):
        if not whole_numbers(chain.from_iterable(group.spans)):
            value = f"{place(where)} has spans that are not whole numbers"
            raise violation("spans", value, "a span is (document, start, stop)", "use integers")
        for document, start, stop in group.spans:
            if not 0 <= document < count:
                value = f"{place(where)} works on document {document}"
                raise violation("spans", value, f"there are {count} documents", f"use 0 to {count - 1}")
            if not 0 <= start < stop <= lengths[document]:
                value = f"{place(where)} works on document {document} [{start}:{stop})"
                must = f"a span is not empty and inside its document of {lengths[document]} tokens"
                low = min(max(start, 0), lengths[document] - 1)
                raise violation("spans", value, must, f"use [{low}:{min(max(stop, low + 1), lengths[document])})")


def coverage(plan: Plan) -> None:
    """Every token of every document is worked on exactly once, by pieces in ascending order of rounds."""
    done = [0] * len(plan.documents)
    for p, pipeline in enumerate(plan.pipelines):
        for r, current in enumerate(pipeline.rounds):
            for document, start, stop in current.by_stage[0].spans():
                if start != done[document]:
                    what = "again" if start < done[document] else "before the tokens in front of it"
                    value = f"pipeline {p} round {r} works on document {document} [{start}:{stop}) {what}"
                    must = "every token is covered exactly once, in causal order"
                    raise violation("coverage", value, must, f"continue document {document} at token {done[document]}")
                done[document] = stop
    if done != list(plan.documents):
        document = next(k for k, length in enumerate(plan.documents) if done[k] != length)
        value = f"document {document}: {done[document]} of {plan.documents[document]} tokens are covered"
        must = "every token is covered exactly once"
        way_out = f"add document {document} [{done[document]}:{plan.documents[document]}) to a round"
        raise violation("coverage", value, must, way_out)


def pieces(plan: Plan) -> None:
    """The pieces of a document are in different rounds of one pipeline, on the same ranks in the same shape.

    Keys and values of earlier pieces stay where they were computed, and a later piece reads them there. With a ring
    they are passed around beside the piece's own.
    """
    home: dict[tuple[int, int], tuple[tuple[int, ...], int, int, bool]] = {}
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    lengths = plan.documents
    for (p, r, s, _), stage, group in stage_groups(plan):
        for document, start, stop in group.spans if stage.layer_count else ():
            if stop - start == lengths[document]:
                continue
            key, shape = (s, document), (group.ranks, group.ulysses, group.ring, group.latent)
            here = f"{place((p, r, s))}: document {document} [{start}:{stop})"
            before = seen.setdefault(key, (p, -1))
            if before == (p, r) or before[0] != p:
                what = "is a second piece in this round" if before[0] == p else f"began in pipeline {before[0]}"
                must = "pieces of a document are in different rounds of one pipeline"
                raise violation("pieces", f"{here} {what}", must, f"move it to a later round of pipeline {before[0]}")
            seen[key] = (p, r)
            if home.setdefault(key, shape) != shape:
                value, first = (
                    f"ranks {ranks} with ulysses {ulysses} x ring {ring}{', latent' if latent else ''}"
                    for ranks, ulysses, ring, latent in (shape, home[key])
                )
                must = "all pieces of a document are on the same ranks in the same shape"
                raise violation("pieces", f"{here} is on {value}", must, f"use {first}")
            if group.method == Method.GATHER or group.route is not None or group.states:
                how = f"method {group.method}" if group.route is None else "a route"
                how = "states that go from rank to rank" if group.states else how
                must = "a document in pieces needs method ring, without a route, and scans of heads"
                way_out = "use method ring and no route, and no states"
                raise violation("pieces", f"{here} is in a group with {how}", must, way_out)


def stage_spans(plan: Plan) -> None:
    """All stages of a round work on the same spans; head stages have their tokens between them."""
    for p, pipeline in enumerate(plan.pipelines):
        for r, current in enumerate(pipeline.rounds if pipeline.chain.heads else ()):
            _check_dealt(f"{place((p, r))}", current.by_stage, pipeline.chain.last)
    for (p, r, s), stage, share in stage_batches(plan):
        if s == 0 or not stage.layer_count:
            continue
        expected, found = Counter(plan.pipelines[p].rounds[r].by_stage[0].spans()), Counter(share.spans())
        if found != expected:
            missing, extra = expected - found, found - expected
            document, start, stop = next(iter(missing or extra))
            value = f"{place((p, r, s))} {'lacks' if missing else 'adds'} document {document} [{start}:{stop})"
            must = "all stages of a round work on the spans of its stage 0"
            raise violation("stage-spans", value, must, "add it" if missing else "remove it")


def _check_dealt(here: str, shares: Sequence[StageMicroBatch], last: int) -> None:
    """Check that the head stages, those behind `last`, have every token of a round once, in groups of one rank."""
    groups = [group for share in shares[last + 1 :] for group in share.groups]
    wide = next((group for group in groups if len(group.ranks) > 1), None)
    if wide is not None:
        value, must = f"{here} has ranks {list(wide.ranks)} in a group of a head stage", "these have groups of one rank"
        raise violation("stage-spans", value, must, "make a group of every rank")
    plain = all(share.attention is None and share.linear is None for share in shares[last + 1 :])
    item, start, stop = np.array([span for group in groups for span in group.spans] or np.empty((0, 3)), np.int64).T
    layout = Layout(np.zeros_like(item), item, start, stop)
    if not plain or not _same_tokens(layout, shares[0]):
        value = f"{here} has {sum(group.tokens for group in groups)} tokens on head stages, or other ones than stage 0"
        must = "head stages work on every token of the round once, without layouts of their own"
        raise violation("stage-spans", value, must, "deal the tokens as `deal_head` does")


def capacity(plan: Plan) -> None:
    """No rank holds more tokens in a round than its checkpoint allows, documents rounded up to the `pad_multiple`.

    A group of degree d with T tokens puts ceil(T / d) on each of its ranks; a rank in several groups holds
    their sum. Where some layers recompute less, or are offloaded, a token takes the memory of both kinds in proportion.
    """
    allowed, offloaded = dict(plan.limits.capacity), dict(plan.limits.offload_capacity)
    pad = plan.limits.pad_multiple
    for where, stage, share in stage_batches(plan):
        lighter = (share.checkpoint.lighter if share.lighter_layers else None) or share.checkpoint
        for checkpoint in (share.checkpoint, lighter):
            if checkpoint not in allowed:
                value = f"{place(where)} uses checkpoint {checkpoint}"
                must = "the limits give a capacity for every checkpoint that is used"
                raise violation("capacity", value, must, f"choose among {', '.join(allowed)}")
        other, others, also = allowed[lighter], share.lighter_layers, ""
        if share.lighter_layers:
            also = f", with {others} layers that recompute less,"
        elif share.offload:
            other, others = offloaded.get(share.checkpoint, allowed[share.checkpoint]), share.offloaded_layers
            also = f", with {others} layers offloaded,"
        most = mixed_capacity(allowed[share.checkpoint], other, others, stage.layer_count)
        held: dict[int, int] = {}
        for group in share.groups:
            tokens = sum([-(-(stop - start) // pad) for _, start, stop in group.spans]) * pad
            each = -(-tokens // len(group.ranks))
            for rank in group.ranks:
                held[rank] = held.get(rank, 0) + each
        loads = [held]
        for layout in (share.attention, share.linear):
            if layout is not None and len(layout):
                loads.append(dict(enumerate(np.bincount(layout.rank, weights=layout.sizes).astype(int).tolist())))
        for load in loads:
            if max(load.values(), default=0) > most:
                rank = next(rank for rank, tokens in load.items() if tokens > most)
                value = f"{place(where)} puts {load[rank]} tokens on rank {rank}"
                must = f"checkpoint {share.checkpoint}{also} allows {most} tokens per rank and round"
                way_out = f"spread {load[rank] - most} of them over more ranks or over other rounds"
                raise violation("capacity", value, must, way_out)


def layouts(plan: Plan) -> None:
    """An explicit layout holds exactly the tokens of the round, each on one rank of the stage.

    The attention layout keeps a document on the ranks of its group.
    """
    for where, stage, share in stage_batches(plan):
        for name, layout in (("attention", share.attention), ("linear", share.linear)):
            if layout is None:
                continue
            here = f"{place(where)} {name} layout"
            if layout.axes != 1:
                value = f"{here} has {layout.axes} axes"
                raise violation("layouts", value, "a round's layouts hold whole tokens", "use one axis")
            foreign = set(layout.rank.tolist()) - set(stage.ranks)
            if foreign:
                value = f"{here} uses rank {min(foreign)}, which is not in the stage"
                raise violation("layouts", value, "tokens stay in their stage", f"use ranks among {list(stage.ranks)}")
            if not _same_tokens(layout, share):
                tokens = sum(group.tokens for group in share.groups)
                value = f"{here} holds {int(layout.sizes.sum())} tokens of {tokens}, or other ones"
                must = "an explicit layout holds every token of the round on exactly one rank"
                raise violation("layouts", value, must, f"leave the {name} layout out to have it derived")
        if share.attention is not None:
            _check_documents(place(where), share.attention, share)


def _same_tokens(layout: Layout, share: StageMicroBatch) -> bool:
    """Compare intervals joined where they touch, whoever holds them; overlaps stay, so replication shows."""
    item, start, stop = np.array(list(share.spans()), dtype=np.int64).T
    wanted, held = (
        merge_touching([np.zeros_like(columns[0]), *columns], keys=2)
        for columns in ((item, start, stop), (layout.item, layout.start, layout.stop))
    )
    return all(map(np.array_equal, held, wanted))


def _check_documents(here: str, layout: Layout, share: StageMicroBatch) -> None:
    allowed = {(rank, span[0]) for group in share.groups for rank in group.ranks for span in group.spans}
    for rank, document in zip(layout.rank.tolist(), layout.item.tolist(), strict=True):
        if (rank, document) not in allowed:
            value = f"{here} attention layout puts document {document} on rank {rank}"
            ranks = next(group.ranks for group in share.groups if any(span[0] == document for span in group.spans))
            must = "in attention a document is on the ranks of its group"
            raise violation("layouts", value, must, f"use ranks among {list(ranks)}")


def remap(plan: Plan) -> None:
    """Going from the attention to the linear layout, tokens stay inside their shard group.

    Ranks of one shard group take part in the same rounds, so such a transfer can never wait for a rank that skips
    the round.
    """
    explicit = [entry for entry in stage_batches(plan) if entry[2].attention is not None or entry[2].linear is not None]
    shard_groups = plan.shard_groups if explicit else ()
    home = np.zeros(plan.limits.ranks, dtype=np.int64)
    for number, shard_group in enumerate(shard_groups):
        home[list(shard_group)] = number
    for where, _, share in explicit:
        move = move_between(share.attention_layout(), share.linear_layout())
        away = np.flatnonzero(home[move.sender] != home[move.receiver])
        if len(away):
            sender, receiver = int(move.sender[away[0]]), int(move.receiver[away[0]])
            value = f"{place(where)} remaps document {move.item[away[0]]} from rank {sender} to {receiver}"
            must = f"a remap stays inside a shard group ({plan.sharding} sharding)"
            raise violation("remap", value, must, f"use ranks among {list(shard_groups[home[sender]])}")
