"""Rivals: published planners, each implemented here from its description and answering with our ``Plan``.

So one cost model and one simulator price them all. They are for comparison only: ``auto`` does not ask them. What is
published and what is our reading of it stands at the head of every file.
"""

from __future__ import annotations

from seqloom.planners.published.allgather_cp import plan_llama_cp
from seqloom.planners.published.hybrid_dp import plan_hybrid_dp
from seqloom.planners.published.megatron import plan_megatron
from seqloom.planners.published.ring_cp import plan_te_cp
from seqloom.planners.published.zeppelin import plan_zeppelin

RIVAL_PLANNERS = {
    "te-cp": plan_te_cp,
    "llama-cp": plan_llama_cp,
    "hybrid-dp": plan_hybrid_dp,
    "megatron": plan_megatron,
    "zeppelin": plan_zeppelin,
}

__all__ = ["RIVAL_PLANNERS", "plan_hybrid_dp", "plan_llama_cp", "plan_megatron", "plan_te_cp", "plan_zeppelin"]
