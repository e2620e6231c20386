"""How near the dispatcher comes to the best choice of kernels.

The best choice of a pack is found by running it with every cut (documents shorter than the cut to one kernel, the
others to another) in each pass.

    python benchmarks/gpu_dispatch.py --lengths LENGTHS --out benchmarks/results/gpu_dispatch.json
"""

from __future__ import annotations

import statistics

import record
from common import Check, options, show, show_checks
from gpu_packs import TOKENS, drawn_packs

CUTS = (64, 128, 256, 512, 1_024, 2_048)
PAIRS = (("triton", "fa4"), ("varlen", "fa4"), ("triton", "varlen"))
SOURCES = ("wikipedia", "prolong", "github", "short")


def pass_ms(run) -> float:
    """Milliseconds on the GPU's clock, of the second of two runs that are queued behind each other."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    run()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def both_passes(choices: dict, tensors, sweeps: int) -> dict[str, list[float]]:
    """Median forward and backward ms of every choice; they take turns: a GPU's clock drifts by several per cent."""
    from seqloom.attention.kernels.interface import Saved

    q, k, v, dout = (tensor.detach() for tensor in tensors)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in choices}
    for _ in range(sweeps):
        for name, prepared in choices.items():
            saved = Saved(q, k, v, *prepared.forward(q, k, v))
            times[name][0].append(pass_ms(lambda one=prepared: one.forward(q, k, v)))
            times[name][1].append(pass_ms(lambda one=prepared, kept=saved: one.backward(dout, kept)))
    return {name: [statistics.median(column) for column in both] for name, both in times.items()}


def every_cut(lengths: list[int], kernels, shape) -> dict[str, object]:
    """Every kernel alone, and every pair with every cut; the best of both passes are picked apart."""
    from seqloom.attention.kernels.dispatch import PreparedSplit
    from seqloom.attention.masks import Segments

    segments = Segments.packed(lengths)
    choices = {name: kernel.prepare(segments, shape) for name, kernel in kernels.items()}
    for short, long in PAIRS:
        for cut in CUTS:
            below = segments.q_len < cut
            if below.any() and not below.all():
                shares = [(kernels[short], segments.select(below)), (kernels[long], segments.select(~below))]
                choices[f"{short} below {cut}, then {long}"] = PreparedSplit.of(shares, shares, shape)
    return choices


def nearness(lengths: list[int], dispatcher, shape, tensors) -> dict[str, object]:
    """Time of the best choice / time of the dispatcher's, forward and backward together.

    The best of many noisy times flatters, so the best choice of each pass then runs against the dispatcher's again.
    """
    from seqloom.attention.masks import Segments

    kernels = {
        kernel.capabilities.name: kernel for kernel in dispatcher.kernels if kernel.capabilities.name != "reference"
    }
    choices = every_cut(lengths, kernels, shape)
    times = both_passes(choices, tensors, 1)
    best = [min(times, key=lambda name, k=k: times[name][k]) for k in (0, 1)]
    finalists = {name: choices[name] for name in best}
    finalists["dispatcher"] = dispatcher.prepare(Segments.packed(lengths), shape)
    times = both_passes(finalists, tensors, 9)
    chosen = sum(times["dispatcher"])
    return {"of best": sum(times[name][k] for k, name in enumerate(best)) / chosen, "best": best, "chosen ms": chosen}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--packs", type=int, default=2, help="per source and head count")
    arguments = parser.parse_args(argv)
    record.require_gpu()
    import torch
    from gpu_rivals import tensors

    from seqloom.attention.kernels.dispatch import default_dispatcher
    from seqloom.attention.kernels.interface import AttentionShape

    figures, checks, rows = {}, [], []
    dispatcher = default_dispatcher(torch.device("cuda", 0))
    for heads, kv_heads in ((32, 32), (32, 8)):
        shape = AttentionShape(heads, kv_heads, 128, torch.bfloat16, torch.device("cuda", 0), 128**-0.5)
        inputs, near = tensors(TOKENS, heads, kv_heads), {}
        for source in SOURCES:
            where = arguments.lengths if source == "wikipedia" else source
            for number, lengths in enumerate(drawn_packs(where, arguments.packs, arguments.seed + 1)):
                near[f"{source} {number}"] = nearness(lengths, dispatcher, shape, inputs)
        label = f"heads {heads}/{kv_heads}"
        figures[label] = near
        of_best = [float(row["of best"]) for row in near.values()]
        rows += [(f"{label} {name}", f"{row['of best']:.3f}", " | ".join(row["best"])) for name, row in near.items()]
        checks.append(Check(f"{label}, best choice / dispatcher, worst pack", min(of_best), 0.95, at_least=True))
    show("time of the best choice / time of the dispatcher's", ("pack", "ratio", "best forward | backward"), rows)
    show_checks(checks)
    record.write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
