"""Dynamic context parallelism of Megatron-LM over its static packing, simulated beside what its dev branch publishes.

Published: 4 to 64 GPUs, four a node, context parallelism 4, lengths log-normal with mean 1,024 and sigma 1.5, clipped
to 128 .. 8,192 tokens, at most 2,048 tokens per GPU; trimmed means. Model, GPU and batch are not named: here Llama 3 8B
on H100 without tensor parallelism, 32 sequences per GPU and step, sharded over all GPUs. Static packing fills packs of
8,192 tokens in order of arrival and deals them to the groups of four. Both run at the published cap; `auto` may hold
what memory holds. Nothing is fitted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import Check, options, progress, show, show_checks
from record import write

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.packing import next_fit
from seqloom.planners.published.megatron import balanced_rounds, micro_batches
from seqloom.planners.published.rivals import RivalGroup, Rounds, tuned_plan
from seqloom.simulate import simulate

PUBLISHED = {4: 1.285, 8: 1.412, 16: 1.212, 32: 1.375, 64: 1.495}
"""GPUs -> times as fast as static packing (`dp_balanced`)."""
GROUP, CAP, LONGEST, SEQUENCES = 4, 2048, 8192, 32
STEPS, CLOSE = 8, 0.20


def drawn(gpus: int, step: int, seed: int) -> np.ndarray:
    """Lengths of one step, int64[n]."""
    sigma = 1.5
    lengths = np.random.default_rng([seed, step]).lognormal(np.log(1024) - sigma**2 / 2, sigma, SEQUENCES * gpus)
    return np.clip(lengths, 128, LONGEST).astype(np.int64)


def static_rounds(tokens: np.ndarray, ranks: int) -> Rounds:
    """Packs in order of arrival, as long as a group holds, dealt to the groups in turn."""
    packs, groups = next_fit(tokens, GROUP * CAP), ranks // GROUP
    rounds: Rounds = []
    for number, pack in enumerate(packs):
        if number % groups == 0:
            rounds.append([])
        first = number % groups * GROUP
        rounds[-1].append(RivalGroup(tuple(range(first, first + GROUP)), pack))
    return rounds


def plans_of(lengths: np.ndarray, cost: CostModel) -> dict[str, Plan]:
    """Plans of one step: static packing, the schedulers of dev and of main at the published cap, and ours."""
    ranks, given = cost.ranks, {"halved": False}
    return {
        "static": tuned_plan(lengths, cost, "static", lambda tokens, _: [static_rounds(tokens, ranks)], **given),
        "dev": tuned_plan(lengths, cost, "dev", lambda tokens, _: [micro_batches(tokens, CAP, ranks)], **given),
        "main": tuned_plan(lengths, cost, "main", lambda tokens, _: [balanced_rounds(tokens, CAP, ranks)], **given),
        "auto": make_plan("auto", lengths, cost),
    }


def row_of(gpus: int, steps: int, seed: int) -> dict[str, Any]:
    """Seconds of the steps on so many GPUs, and speed-ups over static packing."""
    cost = cost_model(f"{gpus // GROUP}x{GROUP}xH100", "llama3-8b", max_length=LONGEST)
    found = [plans_of(drawn(gpus, step, seed), cost) for step in range(steps)]
    seconds = {name: sum(simulate(plans[name], cost).step_ns for plans in found) / 1e9 for name in found[0]}
    gains = {name: seconds["static"] / seconds[name] for name in ("dev", "main", "auto")}
    off = gains["dev"] / PUBLISHED[gpus] - 1
    return {"gpus": gpus, "published": PUBLISHED[gpus], "seconds": seconds, "off": off} | gains


def main(argv: list[str] | None = None) -> None:
    """Run all numbers of GPUs."""
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows = []
    for gpus in (8, 16) if arguments.quick else PUBLISHED:
        progress(f"{gpus} GPUs")
        rows.append(row_of(gpus, 1 if arguments.quick else STEPS, arguments.seed))
    columns = ("GPUs", "published", "dev", "off", "main", "auto")
    shown = []
    for row in rows:
        published, dev, main_, ours = (f"{row[key]:.2f}" for key in ("published", "dev", "main", "auto"))
        shown.append((str(row["gpus"]), published, dev, f"{row['off']:+.0%}", main_, ours))
    show("times as fast as static packing in groups of four", columns, shown)
    checks = [Check(f"{row['gpus']} GPUs: off", abs(row["off"]), CLOSE) for row in rows]
    show_checks(checks)
    write(arguments.out, __file__, arguments, {"rows": rows}, checks, gpu=False, lengths="log-normal, as published")


if __name__ == "__main__":
    main()
