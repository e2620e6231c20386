"""Dropout by counters: against the same hash in numpy's unsigned numbers, and what a good generator promises."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqloom.attention.dropout import keep_mask, mixed32, module_keys, token_keys
from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.models.compile import compile_layers
from seqloom.models.dropout import plan_dropout
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint
from support.dropout import expected_mask

torch.set_num_threads(1)


@given(
    seed=st.integers(-(2**70), 2**70),
    tokens=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**22)), min_size=1, max_size=5),
    number=st.integers(0, 10_000),
    p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    features=st.integers(1, 40),
)
def test_masks_are_those_of_unsigned_arithmetic(seed, tokens, number, p, features):
    documents, positions = torch.tensor(tokens).T
    keys = module_keys(token_keys(seed, documents, positions), number)
    found = keep_mask(keys, mixed32(torch.arange(features)), p, torch.float64)
    wanted = expected_mask(seed, np.array(tokens)[:, 0], np.array(tokens)[:, 1], number, features, p)
    np.testing.assert_array_equal(found.numpy(), wanted)


def kept(seed=0, number=0, rows=2_000, features=512, p=0.3):
    keys = module_keys(token_keys(seed, torch.zeros(rows, dtype=torch.int64), torch.arange(rows)), number)
    return (keep_mask(keys, mixed32(torch.arange(features)), p, torch.float64) > 0).double()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5])
def test_the_share_that_is_dropped(p):
    mask = kept(p=p)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - (1 - p)) < 4 * sigma
    for axis in (0, 1):  # no token and no feature is special
        means, share = mask.mean(axis), (p * (1 - p) / mask.shape[axis]) ** 0.5
        assert float((means - (1 - p)).abs().max()) < 5 * share


def test_neighbours_modules_and_steps_are_independent():
    mask = kept()
    others = {
        "features": (mask[:, 1:], mask[:, :-1]),
        "tokens": (mask[1:], mask[:-1]),
        "tokens and features": (mask[1:, 1:], mask[:-1, :-1]),
        "modules": (mask, kept(number=1)),
        "steps": (mask, kept(seed=1)),
    }
    for name, (one, other) in others.items():
        together = torch.stack([one.flatten(), other.flatten()]).corrcoef()[0, 1]
        assert abs(float(together)) < 4 / one.numel() ** 0.5, name


class Layer(nn.Module):
    """Dropout before a matrix, and after the sum."""

    def __init__(self, p):
        super().__init__()
        self.first, self.inner, self.last = nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x, context):
        return self.last(x + torch.tanh(self.inner(self.first(x))))


def layers(p=0.4, count=2):
    torch.manual_seed(0)
    made = nn.ModuleList(Layer(p) for _ in range(count)).double()
    assert plan_dropout(made) == 2 * count
    return made


def run(made, context, x):
    x = x.clone().requires_grad_()
    made.zero_grad()
    out = x
    for layer in made:
        out = layer(out, context)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(each.grad.clone() for each in made.parameters())]


def test_a_step_drops_the_same_elements_again_and_another_step_others():
    made, x = layers(), torch.randn(7, 8, dtype=torch.float64)
    first, again, other = (run(made, bind_single_rank((4, 3), dropout_seed=seed), x) for seed in (5, 5, 6))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    positions = (0, 1, 2, 3, 0, 1, 2)
    for number, module in enumerate(each for layer in made for each in (layer.first, layer.last)):
        seen = []
        handle = module.register_forward_hook(lambda _, args, out, seen=seen: seen.append((args[0], out)))
        run(made, bind_single_rank((4, 3), dropout_seed=5), x)
        handle.remove()
        [(given_in, out)] = seen
        mask = expected_mask(5, np.array([0] * 4 + [1] * 3), np.array(positions), number, 8, 0.4)
        torch.testing.assert_close(out, given_in * torch.from_numpy(mask))


@pytest.mark.parametrize("kind", [Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_what_is_recomputed_is_dropped_again(kind):
    made, x = layers(), torch.randn(7, 8, dtype=torch.float64)
    context = bind_single_rank((4, 3), dropout_seed=5)
    wanted = run(made, context, x)
    recompute_layers(made)
    object.__setattr__(context.work, "checkpoint", kind)
    assert all(map(torch.equal, run(made, context, x), wanted))


def test_compiled_layers_drop_the_same():
    from torch._dynamo.utils import counters

    plain, made = layers(), layers()
    compile_layers(made, backend="aot_eager")
    counters.clear()
    for lengths in ((4, 3), (9, 2, 5), (30,), (2, 1)):
        x, context = torch.randn(sum(lengths), 8, dtype=torch.float64), bind_single_rank(lengths, dropout_seed=5)
        for found, wanted in zip(run(made, context, x), run(plain, context, x), strict=True):
            torch.testing.assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] == 1  # for all lengths and layers


def test_without_a_seed_nothing_is_dropped_and_no_step_is_trained():
    made, x, context = layers(), torch.randn(7, 8, dtype=torch.float64), bind_single_rank((4, 3))
    with pytest.raises(SeqloomError, match=r"dropout of 0.4 in a context without a seed.*dropout_seed=step"):
        run(made, context, x)
    with torch.no_grad():
        evaluated = made[0](x, context)
    made.eval()
    assert torch.equal(made[0](x, context), evaluated)
    assert torch.equal(made[0](x, bind_single_rank((4, 3), dropout_seed=1)), evaluated)


def test_rows_that_are_not_the_tokens_are_refused():
    [layer] = layers(count=1)
    with pytest.raises(SeqloomError, match=r"dropout on \[5, 8\], where 7 tokens are"):
        layer(torch.randn(5, 8, dtype=torch.float64), bind_single_rank((4, 3), dropout_seed=1))
