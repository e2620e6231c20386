"""What a document takes where layers scan: ranks exchange tokens for heads, or pass states.

One document in one group, priced by the cost model: forward and backward without recomputation, of a whole model. The
mixers are those of Qwen3-Next-80B-A3B (gated delta rule) and Bamba-9B (Mamba-2), as the models' modules describe them.
"""

from __future__ import annotations

from typing import Any

from common import K, options, progress, show
from record import write

from seqloom.cost import CostModel, GroupShape
from seqloom.describe import Cluster, ModelSpec

LENGTHS = (32 * K, 128 * K, 512 * K)
CLUSTERS = {"1x8xH200": (GroupShape(4, 1), GroupShape(8, 1)), "4x8xH100": (GroupShape(8, 2), GroupShape(8, 4))}
QWEN3_NEXT = ModelSpec(
    "qwen3-next-80b-a3b",
    **{"layers": 48, "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256, "ffn": 5120, "gated": True},
    **{"vocabulary": 151_936, "tied": False, "windows": (0, 0, 0, None) * 12},
    **{"experts": 512, "active_experts": 10, "expert_ffn": 512, "shared_ffn": 512},
    mixer_layers=tuple(layer for layer in range(48) if layer % 4 != 3),
    **{"mixer_parameters": 33_718_464, "mixer_values": 32_832, "mixer_exchange": 16_448, "mixer_heads": 32},
    **{"mixer_flops": 5_832_704, "mixer_halo": 24_576, "mixer_state": 1_048_576},
    **{"mixer_run_flops": 11_075_584, "mixer_join_flops": 134_217_728},
)
BAMBA = ModelSpec(
    "bamba-9b",
    **{"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14_336, "gated": True},
    **{"vocabulary": 128_000, "tied": False, "windows": tuple(None if n in (9, 18, 27) else 0 for n in range(32))},
    mixer_layers=tuple(layer for layer in range(32) if layer not in (9, 18, 27)),
    **{"mixer_parameters": 102_286_720, "mixer_values": 33_792, "mixer_exchange": 16_896, "mixer_heads": 128},
    **{"mixer_flops": 8_521_728, "mixer_halo": 25_344, "mixer_state": 1_048_704},
    **{"mixer_run_flops": 10_618_880, "mixer_join_flops": 1_048_576},
)


def prices(cluster: str, model: ModelSpec, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return ms of every document in every group, by heads and by states, and of its exchanges."""
    cost, rows = CostModel(Cluster.parse(cluster), model, stages=2), []
    policy = cost.engine.policies[0]._replace(resident=True)
    for shape in CLUSTERS[cluster]:
        traffic, forms = cost.aligned_traffic(shape), (shape, shape._replace(states=True))
        for length in lengths:
            tables = cost.tables([length], policy, forms)
            heads, states = (tables.group_ns(form, [0]) / 1e6 for form in range(2))
            sent = [
                length * cost.links.mixers(form, traffic, policy.checkpoint).time
                + cost.links.states(form, traffic, policy.checkpoint).time
                for form in forms
            ]
            row = {"cluster": cluster, "model": model.name, "group": str(shape), "tokens": length}
            rows.append(
                row | {"heads": heads, "states": states, "sent heads": sent[0] / 1e6, "sent states": sent[1] / 1e6}
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Price, show and write."""
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows: list[dict[str, Any]] = []
    for cluster in CLUSTERS:
        for model in (QWEN3_NEXT, BAMBA):
            progress(f"{cluster}, {model.name}")
            rows += prices(cluster, model, LENGTHS[:1] if arguments.quick else LENGTHS)
    columns = ("cluster", "model", "group", "tokens")
    numbers = ("heads", "states", "sent heads", "sent states")
    shown = [(*(str(row[name]) for name in columns), *(f"{row[name]:.1f}" for name in numbers)) for row in rows]
    show("a document, ms, and of that its exchanges", (*columns, *numbers), shown)
    lengths = "documents of 32K, 128K and 512K tokens"
    write(arguments.out, __file__, arguments, {"ms": rows}, [], gpu=False, lengths=lengths)


if __name__ == "__main__":
    main()
