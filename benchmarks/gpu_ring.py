"""A ring on one GPU: kernel time of all ranks together, merges included, beside one rank with the whole document.

Ranks are threads. What the transport copies between them stands for the network and is counted apart. The one rank is
measured again and again between the groups, so that a clock that drifts is on both sides of a ratio.

    python benchmarks/gpu_ring.py --out benchmarks/results/gpu_ring.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import record
from common import Check, options, progress, show, show_checks

SHAPES = ((1, 2), (1, 4), (1, 8), (2, 4))
LENGTHS = (65_536, 131_072)
TURNS = 3
Times = tuple[float, float]
"""Milliseconds of kernels, and of copies."""


def in_turns(alone: Callable[[], Times], groups: Mapping[str, Callable[[], Times]]) -> dict[str, tuple[float, Times]]:
    """Measure one rank, every group, one rank, every group, .., one rank.

    Returns for every group, of the turn with the median ratio: what one rank took then, between the measurements
    before and after the group, and the group's own times. A first run counts too; the median leaves it out.
    """
    turns: dict[str, list[tuple[float, Times]]] = {name: [] for name in groups}
    before, _ = alone()
    for _ in range(TURNS):
        found = {name: run() for name, run in groups.items()}
        after, _ = alone()
        for place, (name, times) in enumerate(found.items(), start=1):
            turns[name].append((before + (after - before) * place / (len(found) + 1), times))
        before = after
    return {name: sorted(runs, key=lambda run: run[1][0] / run[0])[TURNS // 2] for name, runs in turns.items()}


def kernel_ms(run) -> Times:
    """Measure one run."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    totals = {False: 0.0, True: 0.0}
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals["memcpy" in event.name.lower()] += event.time_range.elapsed_us() / 1e3
    return totals[False], totals[True]


def group_run(ulysses: int, ring: int, inputs, kernels, pools):
    """A function that runs one document over ulysses x ring ranks, forward and backward."""
    import torch

    from seqloom.attention import attention
    from seqloom.dist import bind
    from seqloom.layout import Span
    from seqloom.plan import Checkpoint, Group, StageMicroBatch

    world, length = ulysses * ring, len(inputs[0])
    work = StageMicroBatch((Group(tuple(range(world)), ulysses, ring, (Span(0, 0, length),)),), Checkpoint.NONE)
    layout = work.attention_layout()
    shares = [
        [torch.cat([tensor[start:stop] for _, start, stop in layout.spans(rank)]).detach() for tensor in inputs]
        for rank in range(world)
    ]

    def body(transport) -> None:
        *wanted, dout = shares[transport.rank]
        q, k, v = (tensor.detach().requires_grad_() for tensor in wanted)
        context = bind(work, transport, device="cuda")
        torch.autograd.grad(attention(q, k, v, context, kernels=kernels), (q, k, v), dout)

    return lambda: pools[world].run(body)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    arguments = parser.parse_args(argv)
    record.require_gpu()
    import torch
    from gpu_rivals import tensors

    from seqloom.attention.kernels.dispatch import default_dispatcher
    from seqloom.dist import Ranks

    kernels = default_dispatcher(torch.device("cuda", 0))
    figures, checks, rows = {}, [], []
    pools = {world: Ranks(world) for world in sorted({1, *(ulysses * ring for ulysses, ring in SHAPES)})}
    for heads, kv_heads in ((32, 32), (32, 8)):
        for length in LENGTHS:
            other = [length - 613 - length // 97] if length == min(LENGTHS) else []  # a length nobody plans for
            for tokens in (length, *other):
                inputs = tensors(tokens, heads, kv_heads)
                name = f"heads {heads}/{kv_heads}, {tokens:,} tokens"
                progress(name)
                runs = {
                    f"{name}, ulysses {shape[0]} x ring {shape[1]}": group_run(*shape, inputs, kernels, pools)
                    for shape in ((1, 1), *SHAPES)
                }
                one, *others = ((label, partial(kernel_ms, run)) for label, run in runs.items())
                for label, (alone, (spread, copied)) in in_turns(one[1], dict(others)).items():
                    figures[label] = {"alone ms": alone, "kernels ms": spread, "copies ms": copied}
                    rows.append((label, f"{alone:.1f}", f"{spread:.1f}", f"{spread / alone:.3f}"))
                    checks.append(Check(f"{label}, to one rank", spread / alone, 1.06))
    for pool in pools.values():
        pool.close()
    show("kernel time of all ranks", ("group", "one rank, ms", "all ranks, ms", "ratio"), rows)
    show_checks(checks)
    record.write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
