"""verl's `rearrange_micro_batches`, by cost: none above the cap of tokens, and the same number on all ranks.

    from verl.utils import seqlen_balancing                # before verl's engines, which take the name from there

    seqlen_balancing.rearrange_micro_batches = rearrange_micro_batches

Arguments and results are verl's own. Where `verl_partitions` of `integrations.balancing` divides a batch over ranks,
this divides the share of one rank into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from seqloom.errors import SeqloomError
from seqloom.integrations.balancing import Work, attention_work, split_largest, verl_micro_batches


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    work: Work = attention_work,
) -> tuple[list[Any], list[list[int]]]:
    """Return micro-batches of a rank's batch, and the samples of each.

    Args:
        batch: a TensorDict with `input_ids`, nested, or padded with `attention_mask`.
        max_token_len: tokens that a micro-batch may have.
        dp_group: ranks that need the same number of micro-batches, unless `same_micro_num_in_dp` is False.
        num_batches_divided_by: their number is a multiple of it, for interleaved pipelines.
        min_num_micro_batch: fewest micro-batches.
        use_dynamic_bsz_balance: put the lightest first and last, where pipelines fill and drain; else heaviest first.
        force_group_size: neighbouring samples that stay together, as pairs of a reward model do.
        work: what a sample costs, by its length.
    """
    from verl.utils import tensordict_utils

    ids = batch["input_ids"]
    lengths = (ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(1)).tolist()
    if len(lengths) % force_group_size:
        raise SeqloomError(
            f"{len(lengths)} samples in groups of {force_group_size}: they do not divide; give a multiple of it"
        )
    firsts = range(0, len(lengths), force_group_size)
    tokens = [sum(lengths[first : first + force_group_size]) for first in firsts]
    costs = [int(each) for each in work(lengths)]
    weights = [sum(costs[first : first + force_group_size]) for first in firsts]
    multiple = num_batches_divided_by or 1

    def packed(least: int) -> list[list[int]]:
        return verl_micro_batches(tokens, max_token_len, min_num_micro_batch=least, work=lambda _: weights)

    # All ranks learn of what one of them cannot do before any raises: the others would wait in the next collective.
    first = [] if max(tokens) > max_token_len else packed(1)
    least, longest, most = max(len(first), min_num_micro_batch or 1), max(tokens), len(tokens)
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        least, longest, most = _of_all_ranks(least, longest, most, dp_group)
    least = -(-least // multiple) * multiple
    if longest > max_token_len or least > most:
        raise SeqloomError(
            f"max_token_len {max_token_len} for a sample, or a forced group, of {longest} tokens, and {least} "
            f"micro-batches where a rank has {most} of them: raise max_token_len, or give the ranks more samples"
        )
    parts = packed(least)
    if len(parts) > least:  # it packs more loosely then
        parts = split_largest(first, tokens, least)
    if use_dynamic_bsz_balance:
        parts = parts[::2][::-1] + parts[1::2]
    found = [_samples(part, force_group_size) for part in parts]
    return [tensordict_utils.index_select_tensor_dict(batch, samples) for samples in found], found


def _of_all_ranks(least: int, longest: int, most: int, group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Return the most micro-batches that a rank needs, the longest unit, and the fewest units that a rank has."""
    from verl.utils.device import get_device_name

    device = "cpu" if dist.get_backend(group) == "gloo" else get_device_name()
    told = torch.tensor([least, longest, -most], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    least, longest, most = told.tolist()
    return least, longest, -most


def _samples(units: Sequence[int], size: int) -> list[int]:
    """Return the samples of groups of neighbours."""
    return [unit * size + k for unit in units for k in range(size)]
