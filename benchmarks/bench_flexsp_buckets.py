"""How far FlexSP's buckets overestimate the tokens of a batch: its dynamic programme beside intervals of equal width.

GPT-7B on 64 A100-40G, context 192K, batches of 512 sequences. A batch is cut into the fewest micro-batches by the
published algorithm, each of these into 16 buckets or more; a sequence counts as long as the longest of its bucket. More
micro-batches, as the solver tries too, have more buckets in all and add less: the paper does not say how many it cut.
Equal width, our reading: as many buckets, of equal width, between 0 and the longest sequence of the micro-batch. The
paper prints the worst batch. Only the Wikipedia lengths are those of the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import A100, K, batches, options, progress, show, source_name
from record import write

from seqloom.api import cost_model
from seqloom.planners.published.flexsp import blast, bucket, fewest_chunks

BUCKETS, CONTEXT = 16, 192 * K
PUBLISHED = {"GitHub": (0.007, 0.134), "CommonCrawl": (0.005, 0.088), "Wikipedia": (0.023, 0.221)}
"""Tokens added by buckets over true tokens, most of all batches: dynamic programme, equal width."""


def added(lengths: np.ndarray, capacity: int) -> tuple[float, float]:
    """Share of tokens that buckets add to a batch, int64[n] tokens: dynamic programme, equal width."""
    found = np.zeros(2)
    for chunk in blast(lengths, fewest_chunks(lengths, capacity)):
        tokens = lengths[chunk]
        made = bucket(tokens, BUCKETS, capacity)
        found[0] += sum(int(tokens[own].max()) * len(own) for own in made) - int(tokens.sum())
        found[1] += equal_width(tokens, len(made)) - int(tokens.sum())
    programme, plain = (found / lengths.sum()).tolist()
    return programme, plain


def equal_width(tokens: np.ndarray, count: int) -> int:
    """Tokens if every sequence is as long as the longest of its bucket, of so many between 0 and the longest."""
    place = -(-tokens * count // int(tokens.max()))
    longest = np.zeros(count + 1, dtype=np.int64)
    np.maximum.at(longest, place, tokens)
    return int(longest[place].sum())


def main(argv: list[str] | None = None) -> None:
    """Bucket the batches of all three sources."""
    arguments = options(__doc__).parse_args(argv)
    cost = cost_model(A100[0], A100[1], profile=A100[2], max_length=CONTEXT)
    capacity = cost.ranks * max(cost.capacity(policy) for policy in cost.policies)
    sources = {"GitHub": "github-flexsp", "CommonCrawl": "commoncrawl", "Wikipedia": arguments.lengths}
    rows: list[dict[str, Any]] = []
    for data, source in sources.items():
        progress(data)
        work = batches(source, 4 if arguments.quick else 40, seed=arguments.seed, context=CONTEXT, skip=10)
        shares = np.array([added(cost.padded_lengths(each), capacity) for each in work])
        rows.append({"data": data, "lengths": source_name(source), "published": PUBLISHED[data]})
        rows[-1] |= {"most": shares.max(axis=0).tolist(), "mean": shares.mean(axis=0).tolist()}
    shown = [
        (f"{row['data']}, {name}", *(f"{row[key][k]:.1%}" for key in ("published", "most", "mean")), row["lengths"])
        for row in rows
        for k, name in enumerate(("dynamic programme", "equal width"))
    ]
    show("tokens that buckets add", ("", "published, most", "most", "mean", "lengths"), shown)
    write(arguments.out, __file__, arguments, {"rows": rows}, [], gpu=False)


if __name__ == "__main__":
    main()
