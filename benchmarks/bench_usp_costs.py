"""USP's memory and cost tables as published and as priced here: bytes of state per GPU, values on the wire per token.

State of LLaMA2-7B on N = 8 GPUs. Published, in sizes P of the bf16 parameters: gradients G = P, optimiser 6P; the table
says what of it is divided by N. Here gradients are float32 (2P), and full sharding holds two gathered layers and their
gradients, embedding and head whole. Working buffers are left out.

Values that attention's all-to-all and tensor parallelism exchange per token and layer, forward and backward without
recomputation, in hidden sizes. Both count what a GPU keeps for itself, as the paper does. Its table charges Ulysses and
tensor parallelism alike; per GPU, Ulysses moves 1 / N of it, as its author has said since: the last rows.
"""

from __future__ import annotations

from typing import NamedTuple

from common import options, show
from record import write

from seqloom.api import cost_model
from seqloom.cost import CostModel, GroupShape
from seqloom.cost.communication import Communication, tensor_gathers
from seqloom.plan import Checkpoint, LayerRange

GPUS, GIB = 8, 1024**3
PARAMETER_BYTES = 2


class Row(NamedTuple):
    """A published figure and ours, in the same unit."""

    what: str
    published: float
    simulated: float


def state_rows(model: str) -> list[Row]:
    """GiB of parameters, gradients and optimiser per GPU under every way to divide them."""
    priced = {name: cost_model(f"1x{GPUS}xA800", model, sharding=name, budget_gib=4096) for name in ("none", "free")}
    priced["full"] = cost_model(f"1x{GPUS}xA800", model, sharding="full")
    whole = PARAMETER_BYTES * priced["full"].model.parameters() / GIB
    return [
        Row("DP: P + G + 6P, GiB", 8 * whole, state_gib(priced["none"])),
        Row("ZeRO-1: P + G + 6P/N, GiB", (2 + 6 / GPUS) * whole, state_gib(priced["free"])),
        Row("ZeRO-3: (P + G + 6P)/N, GiB", 8 / GPUS * whole, state_gib(priced["full"])),
        Row("TP: (P + G + 6P)/N, GiB", 8 / GPUS * whole, state_gib(priced["none"].with_tensor(GPUS))),
    ]


def state_gib(cost: CostModel) -> float:
    """GiB of a GPU before any token, without working buffers."""
    every = LayerRange(0, cost.model.layers, cost.model.layers)
    return (cost.memory.fixed_bytes(cost.policies[0]) - cost.memory.working_bytes(every)) / GIB


def traffic_rows(model: str, published: float) -> list[Row]:
    """Hidden sizes per token and layer that Ulysses and tensor parallelism exchange, of a group and per GPU."""
    cost = cost_model(f"1x{GPUS}xA800", model)
    spec, shape = cost.model, GroupShape(GPUS, 1)
    sent = Communication(cost.profile, cost.cluster, spec).ulysses_bytes(shape, Checkpoint.NONE)
    ulysses = sent * GPUS / (spec.layers * PARAMETER_BYTES * spec.hidden)
    tensor = 2.0 * tensor_gathers(Checkpoint.NONE)  # as many reductions as gathers, of all tokens on every GPU
    return [
        Row(f"Ulysses, {model}: hidden sizes per token", published, ulysses),
        Row(f"TP-sp, {model}: hidden sizes per token", 8.0, tensor),
        Row(f"Ulysses / TP-sp per GPU, {model}", published / 8.0, ulysses / GPUS / tensor),
    ]


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows = [*state_rows("llama-7b"), *traffic_rows("llama-7b", 8.0), *traffic_rows("llama3-8b", 4.0 + 4.0 / 4)]
    shown = [(row.what, f"{row.published:.2f}", f"{row.simulated:.2f}") for row in rows]
    show("USP's memory and cost tables, N = 8", ("", "published", "here"), shown)
    figures = {"rows": [row._asdict() for row in rows]}
    write(arguments.out, __file__, arguments, figures, [], gpu=False, lengths="none")


if __name__ == "__main__":
    main()
