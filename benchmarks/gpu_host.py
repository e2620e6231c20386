"""What an attention call costs the host beyond launching its kernels, and whether it ever waits for the GPU.

python benchmarks/gpu_host.py --out benchmarks/results/gpu_host.json
"""

from __future__ import annotations

import statistics
import time

import record
from common import Check, options, show, show_checks

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "aten::item")
PACKS = {"one of 16K": [16_000], "four of 4K": [4_001] * 4, "64 of 100 to 400": list(range(100, 420, 5))}


LAYERS = 16
"""Attention calls of one graph: a step wakes autograd's thread once, not once per call."""


class Timed:
    """A kernel that counts the host time inside its own calls; what an attention call takes more is the engine's."""

    def __init__(self, kernel) -> None:
        self.kernel, self.capabilities, self.seconds = kernel, kernel.capabilities, 0.0

    def prepare(self, segments, shape):
        return _TimedCalls(self, self.kernel.prepare(segments, shape))


class _TimedCalls:
    def __init__(self, clock: Timed, prepared) -> None:
        self.clock, self.prepared = clock, prepared

    def forward(self, *inputs):
        return self._timed(self.prepared.forward, inputs)

    def backward(self, *inputs):
        return self._timed(self.prepared.backward, inputs)

    def _timed(self, call, inputs):
        begin = time.perf_counter()
        found = call(*inputs)
        self.clock.seconds += time.perf_counter() - begin
        return found


def enqueue_us(runs: dict, clock: Timed, rounds: int = 25) -> dict[str, tuple[float, float]]:
    """Median microseconds per call, forward and backward: all host time, and that outside of kernel calls; in turns."""
    import torch

    took: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first one does not count
        for name, run in runs.items():
            torch.cuda.synchronize()  # a graph has few enough launches to fit into the GPU's queue
            clock.seconds, begin = 0.0, time.perf_counter()
            run()
            whole = time.perf_counter() - begin
            if number:
                took[name].append((whole * 1e6 / LAYERS, (whole - clock.seconds) * 1e6 / LAYERS))
    torch.cuda.synchronize()
    return {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in took.items()}


def host_cost(lengths: list[int], dispatcher, shape, tensors) -> dict[str, float]:
    """Host time per attention call, forward and backward: the engine's, a bare autograd node's, the kernels'; waits."""
    import torch

    from seqloom.attention import attention
    from seqloom.attention.kernels.interface import Saved
    from seqloom.attention.masks import Segments
    from seqloom.dist import bind_single_rank

    q, k, v, dout = tensors
    clock = Timed(dispatcher)
    context, prepared = bind_single_rank(lengths, device="cuda"), clock.prepare(Segments.packed(lengths), shape)
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
        graph(lambda q, k, v: attention(q, k, v, context, kernels=clock))

    costs = enqueue_us({"engine": engine, "node": lambda: graph(Node.apply)}, clock)
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile() as profiler:
        engine()
    torch.cuda.set_sync_debug_mode("default")
    return {
        "engine us": costs["engine"][0],
        "beyond kernels us": costs["engine"][1],
        "bare node us": costs["node"][0],
        "bare node beyond kernels us": costs["node"][1],
        "waits": sum(event.count for event in profiler.key_averages() if event.key in WAITS),
    }


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    arguments = parser.parse_args(argv)
    record.require_gpu()
    import torch
    from gpu_rivals import tensors

    from seqloom.attention.kernels.dispatch import default_dispatcher
    from seqloom.attention.kernels.interface import AttentionShape

    figures, checks = {}, []
    dispatcher = default_dispatcher(torch.device("cuda", 0))
    shape = AttentionShape(32, 8, 128, torch.bfloat16, torch.device("cuda", 0), 128**-0.5)
    for name, lengths in PACKS.items():
        figures[name] = cost = host_cost(lengths, dispatcher, shape, tensors(sum(lengths), 32, 8))
        checks.append(Check(f"{name}, host time beyond the kernels, us per call", cost["beyond kernels us"], 150))
        checks.append(Check(f"{name}, waits for the device in 16 calls", cost["waits"], 0))
    rows = [(name, *(f"{value:,.0f}" for value in cost.values())) for name, cost in figures.items()]
    columns = ("documents", "engine", "of it beyond kernels", "bare node", "of it beyond kernels", "waits")
    show("host time of a call, forward and backward, us", columns, rows)
    show_checks(checks)
    record.write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
