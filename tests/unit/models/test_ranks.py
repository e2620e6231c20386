"""The reference transformer on several ranks: the gradients of all ranks add up to those of one process."""

import pytest
import torch

from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.plan import Checkpoint, Group, StageMicroBatch

LENGTHS = [9, 1, 40, 3, 17]
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
MODELS = {
    "grouped": ({}, TransformerOptions()),
    "tied, windows": ({"tied": True, "windows": (7, None)}, TransformerOptions(qk_norm=True)),
    "six heads": ({"heads": 6, "kv_heads": 3, "head_dim": 4}, TransformerOptions(qkv_bias=True)),
}


@pytest.mark.parametrize(("ulysses", "ring"), SHAPES)
@pytest.mark.parametrize("which", MODELS)
def test_logits_and_summed_gradients_equal_plain_torch(kit, which, ulysses, ring):
    changes, options = MODELS[which]
    model, docs = kit.lively(kit.tiny(**changes), options), kit.documents(LENGTHS)
    found = kit.errors(kit.run(model, docs, kit.one_group(LENGTHS, ulysses, ring)), kit.plain(model, docs))
    assert max(found.values()) < 1e-10, found


def test_groups_of_different_shapes_side_by_side(kit):
    """One round: a long document on four ranks, shorter ones on two and on one."""
    groups = (
        Group((0, 1, 2, 3), 2, 2, (Span(2, 0, 40),)),
        Group((4, 5), 1, 2, (Span(4, 0, 17), Span(1, 0, 1))),
        Group((6,), 1, 1, (Span(0, 0, 9), Span(3, 0, 3))),
    )
    model, docs = kit.lively(kit.tiny()), kit.documents(LENGTHS)
    found = kit.errors(kit.run(model, docs, StageMicroBatch(groups, Checkpoint.NONE)), kit.plain(model, docs))
    assert max(found.values()) < 1e-10, found


def test_a_changed_token_changes_nothing_in_other_documents_bit_for_bit(kit):
    model, docs = kit.lively(kit.tiny()), kit.documents(LENGTHS)
    before = kit.run(model, docs, kit.one_group(LENGTHS, 2, 2)).logits
    docs[4][3] = (docs[4][3] + 1) % 31
    after = kit.run(model, docs, kit.one_group(LENGTHS, 2, 2)).logits
    for k in range(len(docs)):
        assert torch.equal(before[k], after[k]) == (k != 4)
    assert torch.equal(before[4][:3], after[4][:3])  # what comes earlier in the document does not see it either


@pytest.mark.parametrize("place", ["in a group", "in no group"])
def test_a_rank_without_tokens_gives_zero_gradients_for_every_parameter(kit, place):
    lengths = [3]
    work = kit.one_group(lengths, 2, 2) if place == "in a group" else kit.one_group(lengths)
    model, docs = kit.lively(kit.tiny(), TransformerOptions(qk_norm=True, qkv_bias=True)), kit.documents(lengths)
    result = kit.run(model, docs, work, world=4)
    idle = [rank for rank in range(4) if not work.attention_layout().spans(rank)]
    assert idle
    for rank in idle:
        for name, parameter in model.named_parameters():
            gradient = result.shares[rank][name]
            assert gradient is not None and gradient.shape == parameter.shape and not gradient.any(), name
    assert max(kit.errors(result, kit.plain(model, docs)).values()) < 1e-10
