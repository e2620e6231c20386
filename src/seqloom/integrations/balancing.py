"""Which sequences a rank, and which micro-batch, takes: functions in the place of those of RL frameworks.

    verl_partitions(seqlens, k, equal_size)            verl        get_seqlen_balanced_partitions
    verl_micro_batches(seqlens, max_token_len)         verl        the index lists of rearrange_micro_batches
    nemo_rl_bins(lengths, bin_capacity, ...)           NeMo-RL     SequencePacker._pack_implementation
    skyrl_bins(lengths, bin_capacity, ...)             SkyRL       SeqPacker.pack
    slime_schedule(args, config, lengths, ...)         slime       build_dp_schedule

Every sequence is placed once, no part is empty, and no micro-batch has more tokens than its cap. Each function also
runs the algorithm of its host (differencing, first-fit decreasing, least loaded first, first-fit and halving), and
returns that one's answer where it is better: it is never slower. None of the hosts is imported, nor torch.

`work` says what a sequence costs: a function from lengths to numbers, such as `document_work(cost_model(...))`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.planners.packing import largest_differencing

Work = Callable[[Sequence[int]], Sequence[int]]
"""What sequences of these lengths cost, non-negative integers: ns, or any unit."""
Parts = list[list[int]]
"""Numbers of sequences, part by part."""
CHANGES = 2_000
"""Exchanges that a balance looks at; a count, so that the same lengths have the same answer anywhere."""
EXCHANGED = 4
"""Candidates of micro-batches that are improved by exchanges: the fastest ones."""


def attention_work(lengths: Sequence[int]) -> list[int]:
    """Return 24576 L + L^2, which verl and slime use: FLOPs of a model of 7B parameters, but for a factor."""
    return [24_576 * length + length * length for length in lengths]


def document_work(cost: CostModel, degree: int = 1) -> Work:
    """Return the work by a cost model: ns of a document on a group of `degree` ranks, forward and backward."""
    shapes = [shape for shape in cost.shapes if shape.degree == degree]
    if not shapes:
        degrees = sorted({shape.degree for shape in cost.shapes})
        raise SeqloomError(f"groups of {degree} ranks: this cost model prices groups of {degrees}; give one of these")

    def work(lengths: Sequence[int]) -> list[int]:
        tables = cost.tables(np.asarray(lengths, dtype=np.int64), cost.policies[0], shapes[:1])
        return tables.cost[:, 0].max(axis=0).tolist()

    return work


# -- verl ------------------------------------------------------------------------


def verl_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool, *, work: Work | None = None
) -> Parts:
    """Return k lists of indices, each ascending, whose heaviest is as light as possible: verl's balance over ranks.

    Args:
        seqlen_list: lengths, or what the caller makes of them: verl hands over workloads.
        equal_size: whether all lists have the same number of sequences.
        work: of the numbers given; None: they are workloads themselves.
    """
    weights = [*map(int, work(seqlen_list) if work else seqlen_list)]
    _check_count(len(weights), k_partitions, equal_size)
    return [sorted(part) for part in _balanced(weights, k_partitions, equal_size)]


def verl_micro_batches(
    seqlen_list: Sequence[int],
    max_token_len: int,
    *,
    min_num_micro_batch: int = 1,
    multiple: int = 1,
    work: Work = attention_work,
) -> Parts:
    """Return a rank's micro-batches, index lists of at most `max_token_len` tokens each: verl's dynamic batch size.

    Args:
        min_num_micro_batch: the most that any rank of the data parallel group needs, which verl all-reduces: the same
            number on all of them, or collectives inside of the model wait forever.
        multiple: their number is a multiple of this, for interleaved pipelines.
    """
    return _micro_batches(seqlen_list, max_token_len, 1, min_num_micro_batch, multiple, work)


# -- NeMo-RL, SkyRL --------------------------------------------------------------


def nemo_rl_bins(
    sequence_lengths: Sequence[int],
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    work: Work = attention_work,
) -> Parts:
    """Return bins of indices, each of at most `bin_capacity` tokens: NeMo-RL's packers, whose ranks take bins in turn.

    Args:
        min_bin_count: fewest bins; None: as few as fit.
        bin_count_multiple: their number is a multiple of this: the data parallel ranks, which run bins side by side.
    """
    ranks = bin_count_multiple or 1
    return _micro_batches(sequence_lengths, bin_capacity, ranks, max(min_bin_count or 1, 1), ranks, work)


def skyrl_bins(
    sequence_lengths: Sequence[int],
    bin_capacity: int,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    work: Work = attention_work,
) -> Parts:
    """Return bins as `nemo_rl_bins` does: SkyRL's packer has the same rules, and the same three settings."""
    return nemo_rl_bins(sequence_lengths, bin_capacity, min_bin_count, bin_count_multiple, work=work)


# -- slime -----------------------------------------------------------------------


def slime_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    work: Work = attention_work,
) -> tuple[Parts, list[Parts], list[int], list[int]]:
    """Return (partitions, micro_batch_indices, num_microbatches, global_batch_sizes): slime's schedule of a rollout.

    Partitions are the samples of every rank, step after step; micro-batches name places in them. All ranks have the
    same number of micro-batches in a step. Samples of one rollout stay in one step; what fills no step is left out.

    Args:
        args: has `max_tokens_per_gpu` and `use_dynamic_batch_size`.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size` and `microbatch_group_size_per_vp_stage`.
        global_batch_size: rollouts of a step.
        rollout_indices: the rollout of every sample.
    """
    if not args.use_dynamic_batch_size:
        raise SeqloomError(
            "use_dynamic_batch_size is off: micro-batches of a fixed number of samples may be larger than memory; set "
            "--use-dynamic-batch-size and --max-tokens-per-gpu"
        )
    ranks, interleaved = train_parallel_config["dp_size"], train_parallel_config["vpp_size"] > 1
    group = train_parallel_config["microbatch_group_size_per_vp_stage"] if interleaved else 1
    capacity = args.max_tokens_per_gpu * train_parallel_config["cp_size"]
    steps = _rollout_steps(rollout_indices, global_batch_size)
    partitions: Parts = [[] for _ in range(ranks)]
    batches: list[Parts] = [[] for _ in range(ranks)]
    counts = []
    for samples in steps:
        bins = _micro_batches([total_lengths[i] for i in samples], capacity, ranks, 1, ranks * group, work)
        counts.append(len(bins) // ranks)
        for number, members in enumerate(bins):  # heaviest first: those of a round are next to each other
            rank = number % ranks
            start = len(partitions[rank])
            partitions[rank] += [samples[i] for i in members]
            batches[rank].append([*range(start, start + len(members))])
    return partitions, batches, counts, [global_batch_size] * len(steps)


def _rollout_steps(rollout_indices: Sequence[int], size: int) -> Parts:
    """Return the samples of every full step."""
    samples: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples.setdefault(rollout, []).append(sample)
    if size < 1 or len(samples) < size:
        raise SeqloomError(
            f"{len(samples)} rollouts for a global batch of {size}: a step needs so many, and at least 1; generate "
            "more, or set a smaller --global-batch-size"
        )
    rollouts = [*samples.values()]
    return [
        [sample for rollout in rollouts[first : first + size] for sample in rollout]
        for first in range(0, len(rollouts) - size + 1, size)
    ]


# -- balance of parts --------------------------------------------------------------


def _check_count(sequences: int, parts: int, equal_size: bool = False) -> None:
    if parts < 1 or sequences < parts:
        raise SeqloomError(
            f"{sequences} sequences for {parts} parts: each part gets one or more; give at least {max(parts, 1)} "
            "sequences, or ask for fewer parts"
        )
    if equal_size and sequences % parts:
        raise SeqloomError(
            f"{sequences} sequences for {parts} parts of equal size: they do not divide; give "
            f"{-(-sequences // parts) * parts}, or equal_size=False"
        )


def _balanced(weights: Sequence[int], parts: int, equal_size: bool) -> Parts:
    """Return the better of largest differencing and longest first, after exchanges; no part is empty."""
    found = [largest_differencing(weights, parts, equal_size=equal_size)]
    if not equal_size:
        found.append(_longest_first(weights, parts))
    found = [_exchange(_without_empty(each, weights), weights, equal_size=equal_size) for each in found]
    return min(found, key=lambda each: max(_loads(each, weights)))


def _longest_first(weights: Sequence[int], parts: int) -> Parts:
    """Return parts of the LPT rule: heaviest first, each to the lightest part."""
    found: Parts = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, part = heapq.heappop(heap)
        found[part].append(i)
        heapq.heappush(heap, (load + weights[i], part))
    return found


def _without_empty(parts: Parts, weights: Sequence[int]) -> Parts:
    """Give every empty part the lightest sequence of the part that has most of them."""
    for part in parts:
        if not part:
            most = max(parts, key=len)
            lightest = min(most, key=lambda i: (weights[i], i))
            most.remove(lightest)
            part.append(lightest)
    return parts


def _loads(parts: Parts, weights: Sequence[int]) -> list[int]:
    return [sum(weights[i] for i in part) for part in parts]


def _exchange(
    parts: Parts,
    weights: Sequence[int],
    *,
    equal_size: bool = False,
    lengths: Sequence[int] | None = None,
    capacity: int = 0,
) -> Parts:
    """Move sequences away from the heaviest part, or exchange them, until nothing helps or `CHANGES` were looked at.

    Args:
        lengths, capacity: tokens of the sequences and of a part; None: parts have no cap.
    """
    loads, left = _loads(parts, weights), CHANGES
    tokens = None if lengths is None else _loads(parts, lengths)
    while left > 0:
        heavy = max(range(len(parts)), key=lambda part: (loads[part], -part))
        best, change = loads[heavy], None
        for i in parts[heavy]:
            for light in range(len(parts)):
                if light == heavy or left <= 0:
                    continue
                gives = [None] if not equal_size and len(parts[heavy]) > 1 else []
                for j in [*gives, *parts[light]]:
                    left -= 1
                    shift = weights[i] - (0 if j is None else weights[j])
                    if shift <= 0 or max(loads[heavy] - shift, loads[light] + shift) >= best:
                        continue
                    if lengths is not None and tokens is not None:
                        more = lengths[i] - (0 if j is None else lengths[j])
                        if tokens[light] + more > capacity or tokens[heavy] - more > capacity:
                            continue
                    best, change = max(loads[heavy] - shift, loads[light] + shift), (i, light, j)
        if change is None:
            break
        i, light, j = change
        parts[heavy].remove(i)
        parts[light].append(i)
        if j is not None:
            parts[light].remove(j)
            parts[heavy].append(j)
        for part in (heavy, light):
            loads[part] = sum(weights[k] for k in parts[part])
            if tokens is not None and lengths is not None:
                tokens[part] = sum(lengths[k] for k in parts[part])
    return parts


# -- micro-batches -----------------------------------------------------------------


def _micro_batches(lengths: Sequence[int], capacity: int, ranks: int, least: int, multiple: int, work: Work) -> Parts:
    """Return micro-batches, heaviest first, whose number is a multiple of `multiple` and at least `least`.

    Among the candidates the one is taken under which `ranks` that run them side by side are done first; of those that
    are alike, the one with fewest, and then the one whose heaviest micro-batch is lightest.
    """
    lengths = [*map(int, lengths)]
    longest = max(lengths, default=0)
    if longest > capacity or min(lengths, default=1) < 1:
        raise SeqloomError(
            f"a sequence of {longest if longest > capacity else min(lengths)} tokens with a cap of {capacity} for a "
            f"micro-batch: sequences have 1 to {capacity} tokens; raise the cap, spread sequences over more ranks "
            "(context parallelism), or leave the longest out"
        )
    weights = [*map(int, work(lengths))]
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed = [
        first_fit(lengths, capacity, longest_first),
        first_fit(lengths, capacity, range(len(lengths))),
        least_loaded(lengths, capacity, longest_first),
    ]
    counts = [-(-max(len(each), least) // multiple) * multiple for each in packed]
    count = min(counts)
    _check_count(len(lengths), count)
    found = [
        grow([[*part] for part in each], lengths, most)
        for each, most in zip(packed, counts, strict=True)
        if most <= len(lengths)
        for grow in (split_largest, halve_largest, shorten_longest)
    ]
    fewest = -(-max(-(-sum(lengths) // capacity), least) // multiple) * multiple
    for parts in range(fewest, count + 1, multiple):
        balanced = [largest_differencing(weights, parts), _capped_longest_first(lengths, weights, capacity, parts)]
        found += [_without_empty(each, weights) for each in balanced if each is not None]
    found = [each for each in found if max(_loads(each, lengths)) <= capacity]

    def time(each: Parts) -> tuple[int, int, int]:
        return step_work(each, weights, ranks), len(each), max(_loads(each, weights))

    found.sort(key=time)
    found += [
        _exchange([[*part] for part in each], weights, lengths=lengths, capacity=capacity) for each in found[:EXCHANGED]
    ]
    best = min(found, key=time)
    loads = dict(zip(map(tuple, best), _loads(best, weights), strict=True))
    return [sorted(part) for part in sorted(best, key=lambda part: (-loads[tuple(part)], part))]


def step_work(parts: Parts, weights: Sequence[int], ranks: int) -> int:
    """Return the work of a step in which `ranks` run the micro-batches side by side, heaviest first, in lockstep."""
    return sum(sorted(_loads(parts, weights), reverse=True)[::ranks])


def first_fit(lengths: Sequence[int], capacity: int, order: Iterable[int]) -> Parts:
    """Return bins of the first-fit rule: in this order, each sequence into the first bin with room."""
    bins: Parts = []
    free: list[int] = []
    for i in order:
        place = next((k for k, room in enumerate(free) if room >= lengths[i]), None)
        if place is None:
            bins.append([])
            free.append(capacity)
            place = len(bins) - 1
        bins[place].append(i)
        free[place] -= lengths[i]
    return bins


def least_loaded(lengths: Sequence[int], capacity: int, order: Iterable[int]) -> Parts:
    """Return bins of the worst-fit rule: in this order, each sequence into the emptiest bin, if that has room."""
    bins: Parts = []
    heap: list[tuple[int, int]] = []
    for i in order:
        if heap and heap[0][0] + lengths[i] <= capacity:
            load, place = heap[0]
            bins[place].append(i)
            heapq.heapreplace(heap, (load + lengths[i], place))
        else:
            heapq.heappush(heap, (lengths[i], len(bins)))
            bins.append([i])
    return bins


def shorten_longest(bins: Parts, lengths: Sequence[int], count: int) -> Parts:
    """Return `count` bins: the latest sequences of the bins that had most of them open one each."""
    sources = iter(sorted(range(len(bins)), key=lambda k: (-len(bins[k]), -k)))
    source = next(sources)
    while len(bins) < count:
        while len(bins[source]) == 1:
            source = next(sources)
        bins.append([bins[source].pop()])
    return bins


def halve_largest(bins: Parts, lengths: Sequence[int], count: int) -> Parts:
    """Return `count` bins: while there are fewer, the fullest bin that has two sequences is halved, longest first."""
    while len(bins) < count:
        able = [k for k, part in enumerate(bins) if len(part) > 1]
        fullest = max(able, key=lambda k: (sum(lengths[i] for i in bins[k]), k))
        halves: Parts = [[], []]
        loads = [0, 0]
        for i in sorted(bins[fullest], key=lambda i: -lengths[i]):
            half = int(loads[0] > loads[1])
            halves[half].append(i)
            loads[half] += lengths[i]
        bins[fullest] = halves[0]
        bins.append(halves[1])
    return bins


def split_largest(bins: Parts, lengths: Sequence[int], count: int) -> Parts:
    """Return `count` bins: while there are fewer, the shortest sequence of the fullest bin that has two opens one."""
    while len(bins) < count:
        fullest = max((part for part in bins if len(part) > 1), key=lambda part: sum(lengths[i] for i in part))
        shortest = min(fullest, key=lambda i: (lengths[i], i))
        fullest.remove(shortest)
        bins.append([shortest])
    return bins


def _capped_longest_first(lengths: Sequence[int], weights: Sequence[int], capacity: int, count: int) -> Parts | None:
    """Return parts of the LPT rule under a cap of tokens; None: a sequence fits into none."""
    parts: Parts = [[] for _ in range(count)]
    loads, tokens = [0] * count, [0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], -weights[i], i)):
        fitting = [part for part in range(count) if tokens[part] + lengths[i] <= capacity]
        if not fitting:
            return None
        part = min(fitting, key=lambda part: (loads[part], part))
        parts[part].append(i)
        loads[part] += weights[i]
        tokens[part] += lengths[i]
    return parts
