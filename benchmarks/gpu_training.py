"""Training steps of a transformers model on one GPU, beside plain transformers with the same loss and optimiser.

Needs torch, transformers and a CUDA device of compute capability 9.0 or more; `--quick` runs anywhere. Rivals attend
by flex attention or FlashAttention-4, their layers are plain, compiled or Liger's (`training_rivals.py`); those whose
packages are missing are left out, and the result says so. Layers of ours are compiled.

    python benchmarks/gpu_training.py --lengths LENGTHS --out benchmarks/results/gpu_training.json

packed   packs of 32K tokens with lengths that the process has not seen. Everything is kept for backward on all sides,
         or, where that does not fit, nothing.
long     one document of 128K tokens, beside the fastest rival with full gradient checkpointing
mfu      6 x parameters x tokens + 3 x causal attention forward, over time and 989 TFLOP/s
profile  only if asked for: the kernels of a pack's step by what they are for, beside rivals with faster layers
"""

from __future__ import annotations

import record
from common import options, show, show_checks

PARTS = ("packed", "long", "mfu")


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas between")
    parser.add_argument("--model", default="qwen3-1.7b", help="qwen3-1.7b or llama-1.3b")
    parser.add_argument("--packs", type=int, default=5, help="per source of lengths")
    parser.add_argument("--repeats", type=int, default=2, help="steps of the long document")
    arguments = parser.parse_args(argv)
    if not arguments.quick:
        record.require_gpu()
    from training_parts import Run

    run = Run(arguments)
    for part in arguments.parts.split(","):
        getattr(run, part)()
        record.write(arguments.out, __file__, arguments, run.figures, run.checks)
    for source, ratios in run.figures.get("packed", {}).get("sources", {}).items():
        rows = [(name, f"{middle:.3f} ({low:.3f} - {high:.3f})") for name, (low, middle, high) in ratios.items()]
        show(f"{source}: time of a rival / time of seqloom, quartiles of packs", ("rival", "ratio"), rows)
    show_checks(run.checks)


if __name__ == "__main__":
    main()
