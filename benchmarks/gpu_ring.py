"""A ring on one GPU: kernel time of all ranks together, merges included, beside one rank with the whole document.

Ranks are threads. What the transport copies between them stands for the network and is counted apart.

    python benchmarks/gpu_ring.py --out benchmarks/results/gpu_ring.json
"""

from __future__ import annotations

import sys

import record
from common import Check, options, progress, show, show_checks

SHAPES = ((1, 2), (1, 4), (1, 8), (2, 4))
LENGTHS = (65_536, 131_072)


def kernel_ms(run) -> tuple[float, float]:
    """Milliseconds of kernels, and of copies, in one run after one that does not count."""
    import torch

    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    totals = {False: 0.0, True: 0.0}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals["memcpy" in event.name.lower()] += event.time_range.elapsed_us() / 1e3
    return totals[False], totals[True]


def group_run(ulysses: int, ring: int, inputs, kernels, ranks):
    """A function that runs one document over ulysses x ring ranks, forward and backward."""
    import torch

    from seqloom.attention import attention
    from seqloom.comm import bind
    from seqloom.plan import Checkpoint, Group, Span, Work

    world, length = ulysses * ring, len(inputs[0])
    work = Work((Group(tuple(range(world)), ulysses, ring, (Span(0, 0, length),)),), Checkpoint.NONE)
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

    return lambda: ranks.run(body)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    arguments = parser.parse_args(argv)
    if not record.has_gpu():
        sys.exit("this benchmark needs torch and a CUDA device")
    import torch
    from gpu_rivals import tensors

    from seqloom.attention.kernels.registry import default
    from seqloom.comm import Ranks

    kernels = default(torch.device("cuda", 0))
    figures, checks, rows = {}, [], []
    pools = {world: Ranks(world) for world in sorted({1, *(ulysses * ring for ulysses, ring in SHAPES)})}
    for heads, kv_heads in ((32, 32), (32, 8)):
        for length in LENGTHS:
            other = [length - 613 - length // 97] if length == min(LENGTHS) else []  # a length nobody plans for
            for tokens in (length, *other):
                inputs = tensors(tokens, heads, kv_heads)
                alone, _ = kernel_ms(group_run(1, 1, inputs, kernels, pools[1]))
                for ulysses, ring in SHAPES:
                    label = f"heads {heads}/{kv_heads}, {tokens:,} tokens, ulysses {ulysses} x ring {ring}"
                    progress(label)
                    spread, copied = kernel_ms(group_run(ulysses, ring, inputs, kernels, pools[ulysses * ring]))
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
