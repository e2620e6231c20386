"""Mixtures of experts, beside a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from seqloom.dist import bind_single_rank
from seqloom.dist.expert_parallel import EPGroup
from seqloom.errors import SeqloomError
from seqloom.models.experts import ExpertRange, balance_experts, grouped_linear, run_experts
from seqloom.models.transformer import MixtureOfExperts
from support.steps import tiny_spec

torch.set_num_threads(1)
SPEC = tiny_spec(experts=8, active_experts=3, expert_ffn=6, shared_ffn=10)


def mixture(seed=0):
    torch.manual_seed(seed)
    layer = MixtureOfExperts(SPEC, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def plain(layer, x):
    """Token by token, expert by expert."""
    shares = torch.softmax(layer.gate(x), -1)
    rows = []
    for row, share in zip(x, shares, strict=True):
        best = sorted(range(SPEC.experts), key=lambda expert: -share[expert].item())[: SPEC.active_experts]
        total = 0
        for expert in best:
            gate, up = (layer.experts.gate_up_proj[expert] @ row).split(SPEC.expert_ffn)
            total = total + share[expert] * (layer.experts.down_proj[expert] @ (silu(gate) * up))
        shared = layer.shared_expert
        beside = shared.down_proj.weight @ (silu(shared.gate_proj.weight @ row) * (shared.up_proj.weight @ row))
        rows.append(total / sum(share[expert] for expert in best) + beside)
    return torch.stack(rows)


def gradients(layer, x, out):
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])


def test_a_mixture_is_the_loop_over_tokens_and_experts():
    layer = mixture()
    x = torch.randn(17, SPEC.hidden, dtype=torch.float64, requires_grad=True)
    out, wanted = layer(x, bind_single_rank([17])), plain(layer, x)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(gradients(layer, x, out), gradients(layer, x, wanted))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_send_each_other_tokens_and_all_gradients_add_up(threads, ranks):
    """Unequal tokens, none on rank 1; every rank has the experts of its own range alone."""
    tokens = [5 + 7 * rank if rank != 1 else 0 for rank in range(ranks)]
    x = torch.randn(sum(tokens), SPEC.hidden, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(SPEC.experts)[:3] for _ in range(len(x))])
    weights = torch.rand(chosen.shape, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(SPEC.experts, SPEC.hidden, SPEC.hidden, dtype=torch.float64, requires_grad=True)
    products = torch.einsum("eoi,ti->teo", matrix, x)
    picked = products.gather(1, chosen[:, :, None].expand(-1, -1, SPEC.hidden))
    wanted = (weights[:, :, None] * picked).sum(1)
    wanted_gradients = torch.autograd.grad(wanted.square().sum(), (x, weights, matrix))

    def body(transport):
        group = EPGroup(tuple(range(ranks)), transport.rank, transport)
        rows = slice(sum(tokens[: transport.rank]), sum(tokens[: transport.rank + 1]))
        own = range(*(SPEC.experts // ranks * (transport.rank + step) for step in (0, 1)))
        mine = [x[rows], weights[rows], matrix[own.start : own.stop]]
        mine = [each.detach().clone().requires_grad_() for each in mine]

        def compute(pairs, expert, ends):
            assert len(expert) == len(pairs) == int(ends[-1]) and len(ends) == len(own)
            return grouped_linear(pairs, mine[2], ends)

        out = run_experts(mine[0], chosen[rows], mine[1], ExpertRange(SPEC.experts, own, group), compute)
        return out.detach(), torch.autograd.grad(out.square().sum(), mine)

    outs, found = zip(*threads(ranks).run(body, strict=True), strict=True)
    torch.testing.assert_close(torch.cat(outs), wanted.detach())
    for parts, whole in zip(zip(*found, strict=True), wanted_gradients, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole)


def test_a_token_goes_to_a_rank_once_however_many_of_its_experts_are_there(threads):
    chosen = [torch.tensor([[0, 1, 2], [5, 6, 7], [0, 4, 5]]), torch.tensor([[1, 2, 3]])]

    def body(transport):
        group = EPGroup((0, 1), transport.rank, transport)
        route = group.route(chosen[transport.rank], 8)
        return route.sends, route.receives, route.pairs, route.rows.tolist()

    first, second = threads(2).run(body)
    assert first == ((2, 2), (2, 1), 7, [0, 2, 1, 2])
    assert second == ((1, 0), (2, 0), 5, [0])


def test_numbers_of_no_expert_add_nothing():
    x, weights = torch.randn(3, 4, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    chosen = torch.tensor([[0, 9], [9, 9], [1, 0]])
    matrix = torch.randn(2, 4, 4, dtype=torch.float64)
    half = ExpertRange(4, range(2))  # as in a TP group: others compute the rest
    out = run_experts(x, chosen, weights, half, lambda rows, _, ends: grouped_linear(rows, matrix, ends))
    wanted = torch.stack([x[0] @ matrix[0].T, torch.zeros(4, dtype=torch.float64), x[2] @ (matrix[0] + matrix[1]).T])
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(dtype, width, transposed):
    """Experts without rows, widths that torch's grouped product takes and others, either memory order."""
    x = torch.randn(9, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, width, dtype=dtype).transpose(1, 2)
    weight = (weight if transposed else weight.contiguous()).requires_grad_()
    ends = torch.tensor([4, 4, 8, 9], dtype=torch.int32)
    out = grouped_linear(x, weight, ends)
    wanted = torch.cat([x[a:b] @ w.T for w, a, b in zip(weight, (0, 4, 4, 8), ends.tolist(), strict=True)])
    torch.testing.assert_close(out, wanted)
    found, right = (torch.autograd.grad(each.square().sum(), (x, weight)) for each in (out, wanted))
    torch.testing.assert_close(found, right)


def test_experts_that_ranks_cannot_divide_are_refused(threads):
    context = bind_single_rank([4])
    context.ep_group = EPGroup((0, 1, 2), 0, context.transport)
    with pytest.raises(SeqloomError, match=r"8 experts over 3 ranks: .* expert degree that divides 8"):
        ExpertRange.of(8, context)
    with pytest.raises(SeqloomError, match="a weight of 3 experts where a rank computes 2 of 8"):
        ExpertRange(8, range(2)).in_hand(torch.zeros(3, 1))


def test_biases_follow_the_loads_of_a_step():
    biases = [torch.tensor([0.5, 0.0, 0.0]), None]
    balance_experts(biases, torch.tensor([[6, 0, 3], [1, 1, 1]]), 0.1)
    torch.testing.assert_close(biases[0], torch.tensor([0.4, 0.1, 0.0]))
