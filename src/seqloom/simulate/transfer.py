"""Messages between stages: how many tokens move, and how long it takes."""

from __future__ import annotations

import math
from collections import Counter

from seqloom.cost import CostModel
from seqloom.cost.profile import AnalyticProfile
from seqloom.cost.rounds import tokens_on_ranks
from seqloom.plan import Pipeline, Stage

ACTIVATION_BYTES = 2  # bf16, forward (hidden states) and backward (their gradients)


def message_ns(cost: CostModel, pipeline: Pipeline, number: int, stage: int) -> int:
    """Time of one message of round `number` between `stage` and the next one, either way.

    tokens of the fullest rank of both stages x hidden width x 2 bytes, over the network card's share of a
    rank when the stages lie in different nodes, else over the link inside the node. An additive profile has
    no figures for links: there messages are free.
    """
    work = pipeline.rounds[number].work
    tokens = max(int(tokens_on_ranks(cost, share).max()) for share in work[stage : stage + 2])
    here, there = pipeline.stages[stage : stage + 2]
    return stage_message_ns(cost, tokens, here, there)


def stage_message_ns(cost: CostModel, tokens: int, here: Stage, there: Stage) -> int:
    """Time of a message of so many tokens per rank between two stages."""
    profile = cost.profile
    if not isinstance(profile, AnalyticProfile):
        return 0
    size = tokens * cost.model.hidden * ACTIVATION_BYTES
    nodes = Counter(rank // cost.node_size for rank in here.ranks)
    if len(nodes.keys() | _nodes(there, cost)) == 1:
        rate, link, share = profile.intra.p2p, cost.cluster.intra, 1.0
    else:
        rate, link = profile.network.p2p, cost.cluster.nic
        share = _card_share(cost, max(nodes.values()))
    time = size / (link.gb_s * rate.efficiency * share)  # bytes / (1e9 bytes/s) = ns
    return math.ceil(time + (link.latency_us + rate.call_us + profile.handover_us) * 1e3)


def _nodes(stage: Stage, cost: CostModel) -> set[int]:
    return {rank // cost.node_size for rank in stage.ranks}


def _card_share(cost: CostModel, senders: int) -> float:
    """Network cards per rank when `senders` ranks of a node send at once: at most those near the rank."""
    cards = cost.cluster.nics_per_node
    return min(max(1.0, cards / cost.cluster.gpus_per_node), cards / senders)
