"""What an attention call costs the host beyond launching its kernels, and whether it ever waits for the GPU.

python benchmarks/gpu_host.py --out benchmarks/results/gpu_host.json
"""

from __future__ import annotations

import statistics
import sys
import time

import record
from common import Check, options, show, show_checks

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "aten::item")
PACKS = {"one of 16K": [16_000], "four of 4K": [4_001] * 4, "64 of 100 to 400": list(range(100, 420, 5))}


LAYERS = 16
"""Attention calls of one graph: a step wakes autograd's thread once, not once per call."""


def enqueue_us(runs: dict, rounds: int = 25) -> dict[str, float]:
    """Median microseconds of host time per call, forward and backward, with nothing waiting for the GPU; in turns."""
    import torch

    took: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first one does not count
        for name, run in runs.items():
            torch.cuda.synchronize()  # a graph has few enough launches to fit into the GPU's queue
            begin = time.perf_counter()
            run()
            if number:
                took[name].append((time.perf_counter() - begin) * 1e6 / LAYERS)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in took.items()}


def host_cost(lengths: list[int], dispatcher, shape, tensors) -> dict[str, float]:
    """Host time per attention call, forward and backward: the engine, a bare autograd node, bare kernels; waits."""
    import torch

    from seqloom.attention import attention
    from seqloom.attention.kernels.kernel import Saved
    from seqloom.attention.segments import Segments
    from seqloom.comm import bind_alone

    q, k, v, dout = tensors
    context, prepared = bind_alone(lengths, device="cuda"), dispatcher.prepare(Segments.packed(lengths), shape)
    leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for _ in range(LAYERS)]
    wanted = [q, *(leaf for pair in leaves for leaf in pair)]

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            out, lse = prepared.forward(*inputs)
            ctx.save_for_backward(*inputs, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return prepared.backward(dout, Saved(*ctx.saved_tensors))

    def graph(attend) -> None:
        out = q
        for pair in leaves:
            out = attend(out, *pair)
        torch.autograd.grad(out, wanted, dout)

    def engine() -> None:
        graph(lambda *inputs: attention(*inputs, context, kernels=dispatcher))

    def kernels() -> None:
        kept, out, grad = [], q.detach(), dout
        gradients = []  # kept, as autograd keeps them
        for pair in leaves:
            inputs = (out, *(leaf.detach() for leaf in pair))
            out, lse = prepared.forward(*inputs)
            kept.append(Saved(*inputs, out, lse))
        for saved in reversed(kept):
            grad, *others = prepared.backward(grad, saved)
            gradients += others

    costs = enqueue_us({"engine us": engine, "node us": lambda: graph(Node.apply), "kernels us": kernels})
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile() as profiler:
        engine()
    torch.cuda.set_sync_debug_mode("default")
    return costs | {"waits": sum(event.count for event in profiler.key_averages() if event.key in WAITS)}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    arguments = parser.parse_args(argv)
    if not record.has_gpu():
        sys.exit("this benchmark needs torch and a CUDA device")
    import torch
    from gpu_rivals import tensors

    from seqloom.attention.kernels.kernel import Shape
    from seqloom.attention.kernels.registry import default

    figures, checks = {}, []
    dispatcher = default(torch.device("cuda", 0))
    shape = Shape(32, 8, 128, torch.bfloat16, torch.device("cuda", 0), 128**-0.5)
    for name, lengths in PACKS.items():
        figures[name] = cost = host_cost(lengths, dispatcher, shape, tensors(sum(lengths), 32, 8))
        beyond = cost["engine us"] - cost["kernels us"]
        checks.append(Check(f"{name}, host time beyond the kernels, us per call", beyond, 150))
        checks.append(Check(f"{name}, waits for the device in 16 calls", cost["waits"], 0))
    rows = [(name, *(f"{value:,.0f}" for value in cost.values())) for name, cost in figures.items()]
    show(
        "host time of a call, forward and backward, us", ("documents", "engine", "bare node", "kernels", "waits"), rows
    )
    show_checks(checks)
    record.write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
