"""The chunked loss against torch's cross entropy: value and gradients, in every corner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.dist import bind_single_rank, run_ranks
from seqloom.dist.tensor_parallel import TPGroup
from seqloom.errors import SeqloomError
from seqloom.models.loss import (
    IGNORED,
    PRODUCTS,
    HeadGradients,
    Logits,
    summed_loss,
    token_losses,
    token_statistics,
    valid_tokens,
)

torch.set_num_threads(1)


def inputs(tokens=37, vocabulary=19, dtype=torch.float64, ignored=0.3):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(vocabulary, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden, weight, labels, bias=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


def relative(got, wanted):
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_value_and_gradients_equal_cross_entropy(chunk, dtype, tolerance):
    hidden, weight, labels = inputs(dtype=dtype)
    loss = summed_loss(hidden, weight, labels, chunk=chunk)
    (loss / 11).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = plain(*exact, labels)
    (wanted / 11).backward()
    assert loss.dtype == dtype and relative(loss, wanted) < tolerance
    assert relative(hidden.grad, exact[0].grad) < tolerance and relative(weight.grad, exact[1].grad) < tolerance
    assert not hidden.grad[labels == IGNORED].any()


def test_half_precision_sums_in_float32():
    hidden, weight, labels = inputs(tokens=300, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = summed_loss(hidden, weight, labels, chunk=64)
    loss.backward()
    wanted = plain(*exact, labels)
    wanted.backward()
    assert loss.dtype == torch.float32 and relative(loss, wanted) < 1e-3
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert relative(hidden.grad, exact[0].grad) < 0.01 and relative(weight.grad, exact[1].grad) < 0.01


@pytest.mark.parametrize(("tokens", "ignored"), [(0, 0.0), (5, 1.1)])
def test_nothing_that_counts_gives_exactly_zero(tokens, ignored):
    hidden, weight, labels = inputs(tokens=tokens, ignored=ignored)
    loss = summed_loss(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0 and valid_tokens(labels) == 0
    assert hidden.grad.shape == hidden.shape and not hidden.grad.any() and not weight.grad.any()


def test_a_tied_weight_collects_both_gradients():
    _, weight, labels = inputs()
    ids = labels.clamp(min=0).flip(0)
    summed_loss(weight[ids], weight, labels, chunk=5).backward()
    other = weight.detach().clone().requires_grad_()
    plain(other[ids], other, labels).backward()
    assert relative(weight.grad, other.grad) < 1e-13


def test_gradients_are_found_only_where_they_are_wanted():
    hidden, weight, labels = inputs()
    frozen = weight.detach()
    summed_loss(hidden, frozen, labels, chunk=8).backward()
    other = hidden.detach().clone().requires_grad_()
    plain(other, frozen, labels).backward()
    assert relative(hidden.grad, other.grad) < 1e-13
    with torch.no_grad():
        assert not summed_loss(hidden, weight, labels).requires_grad
    assert relative(summed_loss(hidden.detach(), frozen, labels), plain(hidden, weight, labels)) < 1e-13


def test_large_logits_do_not_overflow():
    hidden, weight, labels = inputs()
    loss = summed_loss(1e4 * hidden, weight, labels)
    assert relative(loss, plain(1e4 * hidden, weight, labels)) < 1e-13


def test_logits_of_all_tokens_never_exist(monkeypatch):
    from seqloom.models import loss as module

    seen = []
    losses = module.plain_losses
    monkeypatch.setattr(module, "plain_losses", lambda rows, *rest: (seen.append(len(rows)), losses(rows, *rest))[1])
    summed_loss(*inputs(), chunk=10)
    assert seen == [10, 10, 10, 7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, w, y: (h[None], w, y), "batch axis"),
        (lambda h, w, y: (h, w, y[:-1]), "one label"),
        (lambda h, w, y: (h, w[:, :-1], y), "vocabulary, hidden"),
        (lambda h, w, y: (h.float(), w, y), "one floating"),
        (lambda h, w, y: (h, w, y.int()), "int64"),
        (lambda h, w, y: (h, w, y.clamp(min=19)), "label 19 with a vocabulary of 19"),
        (lambda h, w, y: (h, w, y.clamp(max=-1)), "label -1"),
    ],
)
def test_bad_input_is_refused(change, words):
    with pytest.raises(SeqloomError, match=words):
        summed_loss(*change(*inputs()))


def test_a_chunk_has_tokens():
    with pytest.raises(SeqloomError, match="chunks of 0"):
        summed_loss(*inputs(), chunk=0)


def test_the_fused_loss_in_the_interpreter():
    """In a process of its own: the interpreter must be chosen before triton is first imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    cases = Path(__file__).with_name("triton_loss_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(cases)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_gradients_of_the_head_wait_together_for_the_next_backward():
    """Three calls, two of them open when the first goes backward: one tensor waits, and the sums are the same."""
    head_gradients, exact = HeadGradients(), []
    _, weight, _ = inputs()
    bias = torch.linspace(-1, 1, 19, dtype=torch.float64, requires_grad=True)
    shared, shared_bias = (each.detach().clone().requires_grad_() for each in (weight, bias))
    losses = []
    for tokens in (20, 37, 5):
        hidden, _, labels = inputs(tokens=tokens)
        exact.append(plain(hidden, weight, labels, bias))
        options = {"bias": shared_bias, "head_gradients": head_gradients}
        losses.append(summed_loss(hidden, shared, labels, chunk=7, **options))
        saved = [each for each in losses[-1].grad_fn.saved_tensors if each is not None]
        assert [each.shape for each in saved] == [hidden.shape], "nothing as large as the head"
    for loss in reversed(losses):
        (loss / 11).backward()
        assert not head_gradients.take()
    (sum(exact) / 11).backward()
    assert relative(shared.grad, weight.grad) < 1e-13 and relative(shared_bias.grad, bias.grad) < 1e-13
    summed_loss(hidden, shared, labels, head_gradients=head_gradients)
    head_gradients.clear()
    assert not head_gradients.take()


@pytest.mark.parametrize("made", [Logits(), Logits(0.3), Logits(1.0, 2.0), Logits(1.7, 0.5)], ids=str)
@pytest.mark.parametrize("chunk", [3, 64])
def test_logits_that_a_model_biases_scales_or_caps(made, chunk):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64, requires_grad=True) for n in (10, 13))
    bias = torch.randn(13, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(13, (10,), generator=draw)
    labels[4] = -100
    products = (hidden @ weight.T + bias) * made.scale
    logits = products if made.cap is None else made.cap * torch.tanh(products / made.cap)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    loss = summed_loss(hidden, weight, labels, bias=bias, chunk=chunk, logits=made)
    assert torch.allclose(loss, wanted, rtol=1e-13)
    given = (hidden, weight, bias)
    for found, truth in zip(*(torch.autograd.grad(each, given) for each in (loss, wanted)), strict=True):
        assert torch.allclose(found, truth, rtol=1e-11, atol=1e-13)


def test_a_bias_in_half_precision_is_summed_in_float32():
    hidden, weight, labels = inputs(tokens=3000, dtype=torch.bfloat16)
    bias = torch.randn(19, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    summed_loss(hidden, weight, labels, bias=bias, chunk=64).backward()
    plain(*exact[:2], labels, exact[2]).backward()
    assert bias.grad.dtype == torch.bfloat16 and relative(bias.grad, exact[2].grad) < 0.01


def test_a_bias_alone_may_learn():
    hidden, weight, labels = inputs()
    bias = torch.ones(19, dtype=torch.float64, requires_grad=True)
    other = bias.detach().clone().requires_grad_()
    sums = HeadGradients()
    for options in ({}, {"head_gradients": sums}):
        bias.grad = None
        summed_loss(hidden.detach(), weight.detach(), labels, bias=bias, **options).backward()
        other.grad = None
        plain(hidden.detach(), weight.detach(), labels, other).backward()
        assert relative(bias.grad, other.grad) < 1e-13
    assert not sums.take()


@pytest.mark.parametrize("bias", [torch.zeros(8).double(), torch.zeros(19), torch.zeros(19, 1).double()])
def test_a_bias_is_a_number_for_every_token_of_the_vocabulary(bias):
    with pytest.raises(SeqloomError, match="a number for every token of the vocabulary"):
        summed_loss(*inputs(), bias=bias)


def test_weighted_tokens_and_the_losses_of_tokens():
    hidden, weight, labels = inputs()
    factors = torch.randn(len(labels), dtype=torch.float64)
    logits = Logits(scale=0.7, cap=3.0)
    loss = summed_loss(hidden, weight, labels, chunk=7, token_weights=factors, logits=logits)
    loss.backward()
    exact = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    capped = 3.0 * torch.tanh(exact[0] @ exact[1].T * 0.7 / 3.0)
    each = cross_entropy(capped, labels, reduction="none", ignore_index=IGNORED)
    (each * factors).sum().backward()
    assert relative(loss, (each * factors).sum()) < 1e-13
    assert relative(hidden.grad, exact[0].grad) < 1e-13 and relative(weight.grad, exact[1].grad) < 1e-13
    losses = token_losses(hidden, weight, labels, chunk=7, logits=logits)
    assert not losses.requires_grad and relative(losses, each) < 1e-13 and not losses[labels == IGNORED].any()


# ---- A vocabulary that a TP group cuts


@pytest.mark.parametrize(("tensor", "counts"), [(2, (5, 32)), (2, (0, 9)), (4, (9, 9, 3, 8)), (4, (0, 0, 0, 0))])
@pytest.mark.parametrize("sorted_rows", [True, False])
@pytest.mark.parametrize("logits", [PRODUCTS, Logits(0.7, 3.0)])
def test_a_cut_vocabulary_has_the_losses_and_gradients_of_a_whole_one(tensor, counts, sorted_rows, logits):
    """Every rank counts its own tokens; biases, caps, weights of tokens, two rounds that wait for one backward."""
    tokens, vocabulary = sum(counts), 20
    hidden, weight, labels = inputs(max(tokens, 1), vocabulary)
    hidden, labels = hidden.detach()[:tokens].requires_grad_(), labels[:tokens]
    bias = torch.linspace(-1, 1, vocabulary, dtype=torch.float64).requires_grad_()
    factors = torch.linspace(0.5, 2, tokens, dtype=torch.float64)
    options = {"chunk": 7, "logits": logits}
    whole = summed_loss(hidden, weight, labels, bias=bias, token_weights=factors, **options)
    (2 * whole / 11).backward()
    each = token_losses(hidden.detach(), weight.detach(), labels, bias=bias.detach(), **options)
    statistics = token_statistics(hidden.detach(), weight.detach(), labels, bias=bias.detach(), **options)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)) if sorted_rows else None
    inverse = None if order is None else torch.argsort(order)

    def body(transport):
        context = bind_single_rank(())
        context.transport = transport
        rank = transport.rank
        group = TPGroup(tuple(range(tensor)), rank, counts, order, inverse, False, context)
        rows, part = slice(sum(counts[:rank]), sum(counts[: rank + 1])), slice(rank * 20 // tensor, None)
        part = slice(part.start, part.start + 20 // tensor)
        own = [x.detach()[cut].clone().requires_grad_() for x, cut in ((hidden, rows), (weight, part), (bias, part))]
        given, sums = {"bias": own[2], "tp_group": group, **options}, HeadGradients()
        losses = [
            summed_loss(own[0], own[1], labels[rows], token_weights=factors[rows], head_gradients=sums, **given)
            for _ in range(2)
        ]
        (sum(losses) / 11).backward()
        found = (losses[0].detach(), *(x.grad for x in own))
        return (*found, *(of(own[0], own[1], labels[rows], **given) for of in (token_losses, token_statistics)))

    loss, dhidden, dweight, dbias, own_each, own_statistics = zip(*run_ranks(tensor, body, strict=True), strict=True)
    pairs = [(sum(loss), whole), (torch.cat(dhidden), hidden.grad), (torch.cat(dweight), weight.grad)]
    pairs += [(torch.cat(dbias), bias.grad), (torch.cat(own_each), each), (torch.cat(own_statistics), statistics)]
    for found, wanted in pairs:
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
