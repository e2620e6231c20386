"""A proven lower bound on the time of a step: one number for all planners, and one for each cut into stages.

Three facts hold for every plan of one stage, and the bound is the best that follows from them.

*Work.* A document at degree ``d`` keeps ``d`` ranks busy for its cost, at a degree that holds it and finishes in time.
All ranks together have ``ranks x step`` rank-nanoseconds. Other ranks may take over the linear part of it, but some
rank has to do it.

*Rounds.* A round costs a rank something before its first document and holds only so many tokens, so every document also
pays for the part of a rank's memory that it fills. Dual feasible functions round these parts up without ever counting a
round twice: two documents that each fill more than half of a rank cannot share it.

*Lock step.* Where all ranks run all rounds together (full sharding), the longest round is at least as long as its
longest document, and holds only one round's worth of tokens; what it cannot hold takes further rounds. A long round is
cheap for long documents and idle for the rest, and the bound is the best compromise.

Plans with several stages or pipelines have a bound of their own: the work of every pipeline rank, and a
document's chain.
"""

from seqloom.planners.bounds.step import lower_bound, plan_bound, policies_bound, stages_bound

__all__ = [
    "lower_bound",
    "plan_bound",
    "policies_bound",
    "stages_bound",
]
