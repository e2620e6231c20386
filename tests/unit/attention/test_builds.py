"""What attention builds before the first step: every kind of heads once."""

import torch

from seqloom.attention import AttentionSpec, attention_builds


class Recorder:
    """A kernel that notes what it is asked to build."""

    def __init__(self):
        self.asked = []

    def builds(self, shape, use):
        self.asked.append((shape.heads, shape.kv_heads, use))
        return [lambda: None]


def asked_for(degrees, **options):
    kernel = Recorder()
    spec = AttentionSpec(8, 4, 16, window=7)
    options = {"longest": 100, "tokens": 50, "degrees": degrees, "kernels": kernel} | options
    found = attention_builds(spec, torch.float32, "cpu", **options)
    assert len(found) == len(kernel.asked)
    return {(heads, kv_heads): use for heads, kv_heads, use in kernel.asked}


def test_groups_with_the_same_heads_are_built_once():
    found = asked_for([(1, 1), (1, 4), (2, 1), (2, 3), (1, 4)])
    assert found.keys() == {(8, 4), (4, 2)}
    alone, shared = found[8, 4], found[4, 2]
    assert alone.tiles and alone.tokens == 50
    assert shared.tiles and shared.tokens == 100
    assert {(use.longest, use.window) for use in found.values()} == {(100, 7)}


def test_without_a_ring_there_are_no_tiles_and_any_number_of_tokens_stays_any():
    found = asked_for([(1, 1), (4, 1)], tokens=None)
    assert not any(use.tiles or use.tokens for use in found.values())


def test_uneven_heads_are_all_built():
    assert asked_for([(3, 1)]).keys() == {(3, 2), (2, 1)}
