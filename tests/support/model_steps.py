"""Steps of a tiny Hugging Face model with a document in pieces, on rank threads, beside plain transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from seqloom.attention import KVCache
from seqloom.dist import bind, run_ranks
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Layout, Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.tiny_models import gradients, targets

SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 5)]  # up to more ranks than there are heads


@st.composite
def steps(draw, shapes=SHAPES):
    """(lengths, groups of every round, ranks): document 0 in one piece or several, others whole in any round.

    A last rank may be in no group.
    """
    ulysses, ring = draw(st.sampled_from(shapes))
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    cuts = sorted(draw(st.sets(st.integers(1, lengths[0] - 1), max_size=2))) if lengths[0] > 1 else []
    edges = [0, *cuts, lengths[0]]
    rounds = [[Span(0, start, stop)] for start, stop in pairwise(edges)]
    for document, length in enumerate(lengths[1:], 1):
        rounds[draw(st.integers(0, len(cuts)))].append(Span(document, 0, length))
    ranks, groups = tuple(range(ulysses * ring)), []
    for spans in rounds:
        spans = draw(st.permutations(spans))
        apart = len(spans) - 1 if draw(st.booleans()) else 0  # in a group of their own, on the last rank
        whole = tuple(span for span in spans if span.document)[:apart]
        shared = tuple(span for span in spans if span not in whole)
        groups.append((Group(ranks, ulysses, ring, shared), *([Group(ranks[-1:], 1, 1, whole)] if whole else [])))
    return lengths, groups, len(ranks) + draw(st.integers(0, 1))


def moved(groups, remap, ranks):
    """The work of a round in which the rank before has the tokens outside of attention, or of the MLP."""
    work = StageMicroBatch(groups, Checkpoint.NONE)
    if remap is None:
        return work
    layout = work.attention_layout()
    boxes = [((rank + 1) % ranks, *span) for rank in range(ranks) for span in layout.spans(rank)]
    return replace(work, linear=Layout.of(boxes), remap=remap)


def run_step(model, ids, rounds, ranks, keep, remap):
    """Return the loss and the gradients of a step, summed over ranks; every rank has all of them."""
    models = [attach(copy.deepcopy(model)) for _ in range(ranks)]
    pieces = tuple(span for groups in rounds for group in groups for span in group.spans if span.document == 0)
    labels = [targets(each) for each in ids]

    def body(transport):
        adapter, kv_cache, losses = model_adapter(models[transport.rank]), KVCache(), []
        recompute_layers(adapter.layers)
        for groups in rounds:
            work = replace(moved(groups, remap, ranks), checkpoint=keep)
            context = bind(work, transport, pieces={0: pieces}, kv_cache=kv_cache)
            rows = [
                torch.cat([each[d][a:b] for d, a, b in context.spans] or [torch.empty(0, dtype=torch.int64)])
                for each in (ids, labels)
            ]
            losses.append(ModelWithLoss(adapter)(*rows, context))
        for loss in reversed(losses):
            loss.backward()
        kv_cache.check_empty()
        return sum(loss.item() for loss in losses)

    loss = sum(run_ranks(ranks, body, strict=True))
    assert all(parameter.grad is not None for own in models for parameter in own.parameters())
    each = [gradients(own) for own in models]
    return loss, {name: sum(found[name] for found in each) for name in each[0]}


def summed(logits, ids):
    """The loss of logits of documents."""
    pairs = zip(logits, ids, strict=True)
    return sum(float(cross_entropy(a, targets(b), reduction="sum", ignore_index=-100)) for a, b in pairs)


def assert_near(got, wanted, tolerance):
    """Loss and gradients of both agree."""
    (loss, found), (expected, grads) = got, wanted
    assert abs(loss - expected) <= tolerance * max(expected, 1.0)
    floor = 1e-3 * max(float(each.norm()) for each in grads.values())
    for key, gradient in grads.items():
        assert float((found[key] - gradient).norm()) <= tolerance * max(float(gradient.norm()), floor), key
