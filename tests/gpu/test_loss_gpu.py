"""The chunked loss on a GPU, where one kernel makes losses and slopes: against torch's cross entropy in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.runtime.loss import IGNORED, plain_losses, summed_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def draw(tokens, vocabulary, dtype):
    generator = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn(tokens, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    labels[::5] = IGNORED
    return hidden, weight, labels


def relative(found, wanted):
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


@pytest.mark.parametrize("vocabulary", [50, 50_257, 151_936])
@pytest.mark.parametrize(("dtype", "value", "slope"), [(torch.bfloat16, 1e-3, 0.01), (torch.float32, 1e-5, 1e-5)])
def test_value_and_gradients_equal_cross_entropy(vocabulary, dtype, value, slope):
    hidden, weight, labels = draw(300, vocabulary, dtype)
    loss = summed_loss(hidden, weight, labels, chunk=128)
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum", ignore_index=IGNORED)
    wanted.backward()
    assert relative(loss, wanted) < value
    assert relative(hidden.grad, exact[0].grad) < slope and relative(weight.grad, exact[1].grad) < slope
    assert not hidden.grad[labels == IGNORED].any()


def test_fused_and_plain_losses_are_the_same():
    fused = pytest.importorskip("seqloom.runtime.triton_loss", reason="triton is not installed").fused_losses
    hidden, weight, labels = draw(64, 128_256, torch.bfloat16)
    with torch.no_grad():
        logits, others = (hidden @ weight.T for _ in range(2))
        found, wanted = fused(logits, labels, IGNORED, True), plain_losses(others, labels, IGNORED, True)
    assert relative(found, wanted) < 1e-6 and relative(logits, others) < 1e-3
