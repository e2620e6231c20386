"""Merging partial results, rows that saw nothing, and accumulators."""

import pytest
import torch

from seqloom.attention.merge import (
    TORCH_OPS,
    GradientAccumulator,
    OutputAccumulator,
    PartialGradient,
    PartialOutput,
    accumulate,
    add_gradients,
    merge_outputs,
    sum_dtype,
)

torch.set_num_threads(1)


def partial(rows, heads, dim, seed, dtype=torch.float64, scale=1.0):
    """Attention of random queries over 7 random keys: logits, out [rows, heads, dim], lse [heads, rows], values."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(heads, rows, 7, generator=generator, dtype=torch.float64)
    values = torch.randn(7, heads, dim, generator=generator, dtype=torch.float64)
    out = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), values)
    return logits, out.to(dtype), torch.logsumexp(logits, -1).to(sum_dtype(dtype)), values


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("count", [2, 5])
def test_parts_are_attention_over_all_keys(scale, count):
    drawn = [partial(5, 3, 4, seed=seed, scale=scale) for seed in range(count)]
    out, lse = merge_outputs([PartialOutput(out, lse, 0) for _, out, lse, _ in drawn], 5, torch.float64)
    logits, values = torch.cat([one[0] for one in drawn], -1), torch.cat([one[3] for one in drawn])
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), values))
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))


def test_a_part_that_saw_nothing_changes_no_bit():
    _, out, lse, _ = partial(4, 2, 3, seed=1, dtype=torch.float32)
    part, nothing = (
        PartialOutput(out, lse, 0),
        PartialOutput(torch.zeros_like(out), torch.full_like(lse, -torch.inf), 0),
    )
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing]):
        merged, merged_lse = merge_outputs(parts, 4, torch.float32)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_parts_that_saw_nothing_stay_nothing():
    nothing = PartialOutput(torch.zeros(2, 1, 3), torch.full((1, 2), -torch.inf), 0)
    out, lse = merge_outputs([nothing, nothing], 2, torch.float32)
    assert torch.equal(out, torch.zeros(2, 1, 3)) and torch.equal(lse, torch.full((1, 2), -torch.inf))


def test_a_nan_is_not_hidden():
    _, out, lse, _ = partial(2, 1, 3, seed=1)
    merged, merged_lse = merge_outputs(
        [PartialOutput(out, lse, 0), PartialOutput(out * torch.nan, lse * torch.nan, 0)], 2, out.dtype
    )
    assert merged.isnan().all() and merged_lse.isnan().all()


def test_a_part_of_the_rows_leaves_the_others_alone():
    _, out, lse, _ = partial(6, 2, 3, seed=1)
    _, other, other_lse, _ = partial(2, 2, 3, seed=2)
    merged, merged_lse = merge_outputs([PartialOutput(out, lse, 0), PartialOutput(other, other_lse, 2)], 6, out.dtype)
    both = merge_outputs([PartialOutput(out[2:4], lse[:, 2:4], 0), PartialOutput(other, other_lse, 0)], 2, out.dtype)
    assert torch.equal(merged[2:4], both[0]) and torch.equal(merged_lse[:, 2:4], both[1])
    assert torch.equal(merged[:2], out[:2]) and torch.equal(merged[4:], out[4:])


def test_merging_many_parts_in_float32_keeps_the_error_flat():
    """Half precision parts, as kernels give them: 32 of them err no more than 2 times one rounding."""
    parts = [partial(64, 2, 16, seed) for seed in range(32)]
    total = OutputAccumulator(parts[0][1].bfloat16(), TORCH_OPS)
    for _, out, lse, _ in parts:
        total.merge(PartialOutput(out.bfloat16(), lse.float(), 0))
    found, _ = total.result()
    logits, values = torch.cat([part[0] for part in parts], -1), torch.cat([part[3] for part in parts])
    truth = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), values)
    once = (truth.bfloat16() - truth).norm()
    assert (found - truth).norm() < 2 * once


def test_a_total_adopts_the_first_part_when_it_covers_all():
    _, out, lse, _ = partial(4, 2, 3, seed=1)
    total = OutputAccumulator(out, TORCH_OPS)
    total.merge(PartialOutput(out, lse, 0))
    found, found_lse = total.result()
    assert found is out and found_lse is lse


def test_a_total_of_parts_of_the_rows():
    _, out, lse, _ = partial(4, 2, 3, seed=1)
    total = OutputAccumulator(out, TORCH_OPS)
    total.merge(PartialOutput(out[:1], lse[:, :1], 0))
    total.merge(PartialOutput(out[2:], lse[:, 2:], 2))
    found, found_lse = total.result()
    assert torch.equal(found[[0, 2, 3]], out[[0, 2, 3]]) and torch.equal(found_lse[:, [0, 2, 3]], lse[:, [0, 2, 3]])
    assert torch.equal(found[1], torch.zeros(2, 3, dtype=out.dtype)) and found_lse[:, 1].eq(-torch.inf).all()


def test_a_total_of_nothing():
    found, lse = OutputAccumulator(torch.ones(3, 2, 4, dtype=torch.bfloat16), TORCH_OPS).result()
    assert torch.equal(found, torch.zeros(3, 2, 4, dtype=torch.bfloat16))
    assert lse.dtype == torch.float32 and lse.eq(-torch.inf).all()


def test_gradients_are_added_in_float32_and_rounded_once():
    one = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    total = add_gradients([PartialGradient(one, 0), *[PartialGradient(one[:1] * 2**-10, 1)] * 8], 3, torch.float32)
    assert total.flatten().tolist() == [1.0, 1.0 + 2**-7, 1.0]
    gradient = GradientAccumulator(one, TORCH_OPS)
    gradient.add(slice(0, 3), one)
    assert gradient.result() is one, "a single share that covers all rows is not copied"
    for _ in range(8):
        gradient.add(slice(1, 2), one[:1] * 2**-10)
    assert gradient.result().tolist() == [[[1.0]], [[1.0 + 2**-7]], [[1.0]]], "bf16 sums would have lost every share"


def test_a_gradient_of_some_rows_and_of_none():
    one = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    gradient = GradientAccumulator(one, TORCH_OPS)
    assert torch.equal(gradient.result(), torch.zeros_like(one))
    gradient.add(slice(0, 1), one[:1])
    assert gradient.result().flatten().tolist() == [1.0, 0.0, 0.0] and gradient.result().dtype == torch.bfloat16


def test_a_gradient_is_written_or_added_in_place():
    total = torch.full((3, 2, 1), torch.nan)
    accumulate(total[:2, :1], torch.ones(2, 1, 1, dtype=torch.bfloat16), fresh=True)
    accumulate(total[:2, :1], torch.ones(2, 1, 1, dtype=torch.bfloat16) * 2**-10, fresh=False)
    assert total[:2, 0].flatten().tolist() == [1 + 2**-10] * 2
    assert total[2].isnan().all() and total[:, 1].isnan().all()
