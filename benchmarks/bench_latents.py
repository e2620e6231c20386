"""What a step of a model with latent attention gains where latents may travel in the place of keys and values.

`auto` plans batches of 512 sequences (256 on one node), context 128K, twice: with every shape that the cost model has,
and with those alone in which keys and values travel. Both plans are priced alike. "latent" is the share of tokens in
groups in which latents travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from common import K, batches, options, progress, show
from record import write

from seqloom.api import cost_model
from seqloom.cost import GroupShape, engines
from seqloom.cost.shapes import with_methods
from seqloom.plan import Plan
from seqloom.planners.registry import PlannerChoice

CONTEXT = 128 * K
CLUSTERS = ("1x8xH200", "8x8xH200", "8x8xH100", "8x8xA100-80G", "4x8xL40S")
MODELS = ("deepseek-v2-lite", "minicpm3-4b")
LARGEST = {"4x8xL40S": "minicpm3-4b"}
"""The only model that a cluster holds."""


@contextmanager
def no_latents() -> Iterator[None]:
    """Leave shapes with latents out of cost models that are made inside."""

    def plain(shapes: Any, node_size: int, nics: int, *_: bool) -> tuple[GroupShape, ...]:
        return with_methods(shapes, node_size, nics)

    with patch.object(engines, "with_methods", plain):
        yield


def latent_share(plan: Plan) -> float:
    """Share of tokens, in per cent, that are in groups in which latents travel."""
    groups = [group for line in plan.pipelines for current in line.rounds for group in current.groups]
    return 100 * sum(group.tokens for group in groups if group.latent) / sum(group.tokens for group in groups)


def gains(cluster: str, model: str, source: str, seed: int, count: int) -> tuple[float, float]:
    """Return by how many per cent a step is longer without latents, and the share of tokens that have them."""
    planner, found = PlannerChoice("auto"), []
    for lengths in batches(source, count, seed=seed, context=CONTEXT, size=256 if cluster.startswith("1x") else 512):
        cost = cost_model(cluster, model, max_length=CONTEXT)
        with no_latents():
            plain = planner.plan(lengths, cost_model(cluster, model, max_length=CONTEXT))
        plan = planner.plan(lengths, cost)
        found.append((100 * (cost.plan_ns(plain) / cost.plan_ns(plan) - 1), latent_share(plan)))
    gain, share = np.mean(found, axis=0).tolist()
    return gain, share


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    arguments = options(__doc__).parse_args(argv)
    sources = {arguments.lengths: "Wikipedia"} | {name: name for name in ("prolong", "agent-traces", "meta128k")}
    clusters, count = (CLUSTERS[:1], 1) if arguments.quick else (CLUSTERS, 2)
    rows: list[dict[str, Any]] = []
    for cluster in clusters:
        for model in (LARGEST[cluster],) if cluster in LARGEST else MODELS:
            for source, name in sources.items():
                progress(f"{cluster}, {model}, {name}")
                gain, share = gains(cluster, model, source, arguments.seed, count)
                rows.append({"cluster": cluster, "model": model, "data": name, "gain": gain, "latent": share})
    shown = [(r["cluster"], r["model"], r["data"], f"{r['gain']:.2f}", f"{r['latent']:.1f}") for r in rows]
    show("a step without latents against one with them, %", ("cluster", "model", "data", "gain", "latent"), shown)
    write(arguments.out, __file__, arguments, {"per cent": rows}, [], gpu=False)


if __name__ == "__main__":
    main()
