"""The chunked loss on a GPU, where one kernel makes losses and slopes: against torch's cross entropy in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.models.loss import IGNORED, plain_losses, summed_loss

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


def torch_loss(hidden, weight, labels):
    """What one writes without this package; sums are float32 or wider."""
    logits = hidden @ weight.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), labels, reduction="sum", ignore_index=IGNORED)


def errors(loss, hidden, weight, labels, dtype):
    """Relative errors against float64: of the loss, of both gradients."""
    inputs = [[x.detach().to(kind).requires_grad_() for x in (hidden, weight)] for kind in (dtype, torch.float64)]
    found, wanted = loss(*inputs[0], labels), torch_loss(*inputs[1], labels)
    found.backward()
    wanted.backward()
    assert not inputs[0][0].grad[labels == IGNORED].any()
    return [relative(found, wanted), *(relative(a.grad, b.grad) for a, b in zip(*inputs, strict=True))]


@pytest.mark.parametrize("vocabulary", [50, 50_257, 151_936])
@pytest.mark.parametrize(("dtype", "floor"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-6)])
def test_errors_are_at_most_twice_those_of_plain_torch(vocabulary, dtype, floor):
    drawn = draw(300, vocabulary, dtype)
    ours = errors(lambda *given: summed_loss(*given, chunk=128), *drawn, dtype)
    theirs = errors(torch_loss, *drawn, dtype)
    assert all(mine <= max(2 * other, floor) for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_fused_and_plain_losses_are_the_same():
    fused = pytest.importorskip("seqloom.models.triton_loss", reason="triton is not installed").fused_losses
    hidden, weight, labels = draw(64, 128_256, torch.bfloat16)
    with torch.no_grad():
        logits, others = (hidden @ weight.T for _ in range(2))
        found, wanted = fused(logits, labels, IGNORED, True), plain_losses(others, labels, IGNORED, True)
    assert relative(found, wanted) < 1e-6 and relative(logits, others) < 1e-3
