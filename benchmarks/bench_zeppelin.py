"""Zeppelin's evaluation, simulated: its three clusters, four LLaMA models, three kinds of data, 16 to 128 GPUs.

All figures are simulated step times under our profiles; none is measured. First the rival is put to the test: Zeppelin
as published (our implementation, `planners/rivals/zeppelin.py`) against ring context parallelism over everything,
beside its published average and ablation. Where these are missed by more than 20 % the verdict is "not validated". Then
our planners against the fastest rival and the proven lower bound, cell by cell: see `zeppelin_cells.py`. With
`--experts` the cells are those of its mixture of experts, 8x550M, of which nothing published is a figure to test with.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

from common import options, progress, show_checks
from record import write
from zeppelin_cells import (
    CLUSTERS,
    DATA,
    EXPERTS,
    GPUS,
    MODELS,
    RIVALS,
    TOKENS,
    Cell,
    own_ablation,
    published_ablation,
    steps,
)
from zeppelin_report import checks_of, own_ablation_of, own_checks, show_cells, show_tables, validation


def row(cell: Cell, count: int, seed: int) -> dict[str, Any]:
    """Everything about one cell; seconds per step, mean over its batches. Both ablations on ArXiv, dense models."""
    batches = cell.batches(count, seed)
    seconds = steps(cell, batches)
    rival = min(RIVALS, key=lambda name: seconds[name])
    best, ours, bound = seconds[rival], seconds["auto"], seconds["bound"]
    found: dict[str, Any] = {
        "cluster": cell.cluster,
        "model": cell.model,
        "data": cell.data,
        "gpus": cell.gpus,
        "documents": [len(batch) for batch in batches],
        "seconds": seconds,
        "best_rival": rival,
        "best_rival_over_auto": best / ours,
        "closed": (best - ours) / (best - bound) if bound < best else 0.0,  # rivals send fewer bits, see `as_published`
    }
    if cell.data == "ArXiv" and cell.model in MODELS:
        found["published_ablation"] = published_ablation(cell, batches)
        found["own_ablation"] = own_ablation(cell, batches[:1])
    return found


def main(argv: list[str] | None = None) -> None:
    """Run all cells."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--batches", type=int, default=2, help="steps per cell")
    parser.add_argument("--experts", action="store_true", help="the cells of the mixture of experts")
    arguments = parser.parse_args(argv)
    models = (EXPERTS.name,) if arguments.experts else MODELS
    cells = [Cell(*names) for names in product(CLUSTERS, models, DATA, GPUS)]
    if arguments.quick:
        cells, arguments.batches = [Cell("A", models[0], "ArXiv", 16), Cell("B", models[0], "GitHub", 16)], 1
    rows = []
    for cell in cells:
        progress(f"{cell.cluster} {cell.model} {cell.data} {cell.gpus}")
        rows.append(row(cell, arguments.batches, arguments.seed))
    figures: dict[str, Any] = {"simulated": True, "tokens_per_gpu": TOKENS, "clusters": CLUSTERS}
    if arguments.experts:
        checks = own_checks(rows)
        show_cells(rows)
        figures["model"] = asdict(EXPERTS)
    else:
        tested = validation(rows)
        checks = checks_of(rows, tested)
        show_tables(rows, tested)
        figures |= {"validation": tested, "own_ablation": own_ablation_of(rows)}
    show_checks(checks)
    figures["cells"] = rows
    drawn = "samplers " + ", ".join(DATA.values())
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths=drawn)


if __name__ == "__main__":
    main()
