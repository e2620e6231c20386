"""Whether a published planner, run here, reproduces its own published speed-up.

A speed-up over a rival says little about the authors' system where the rival here does not give what they measured. So
every row of a rival says "validated" or "not validated". The figures below are those of the committed results
(`benchmarks/results`), and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Claim:
    """A published speed-up and what this implementation gives under some profiles.

    Attributes:
        over: what the speed-up is over.
        ratio: the published figure; None if none could be read, or none that can be repeated.
        close: how far off, as a share, still counts as reproduced.
        found: profile -> the same ratio here, over the batches of the benchmark.
        why: what is known about the claim, or about why it cannot be repeated.
    """

    over: str
    ratio: float | None
    close: float = 0.2
    found: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def validated(self, profile: str) -> bool:
        """Whether the published ratio is met under this profile."""
        here = self.found.get(profile)
        return self.ratio is not None and here is not None and abs(here / self.ratio - 1) <= self.close

    def told(self, profile: str) -> str:
        """The verdict under this profile in one line."""
        verdict = "validated" if self.validated(profile) else "not validated"
        if self.ratio is None:
            return f"{verdict}: {self.why}"
        published = f"published {self.ratio:.2f}x over {self.over}"
        if profile not in self.found:
            return f"{verdict}: {published}, not tried under profile {profile}"
        return f"{verdict}: {self.found[profile]:.2f}x under profile {profile}, {published}"


CLAIMS: dict[str, Claim] = {
    "flexsp": Claim("static:64", 1.72, 0.10, {"flexsp-a100": 1.88}),
    "te-cp": Claim("", None, why="the baseline of Zeppelin's figures, with no speed-up of its own"),
    "llama-cp": Claim("", None, why="no speed-up of its own could be read"),
    "hybrid-dp": Claim("", None, why="published up to 7.89x on 1,024 GPUs of an unnamed kind"),
    "megatron": Claim("", None, why="published 1.21x to 1.50x over static packing, on an unnamed model and cluster"),
    "zeppelin": Claim("te-cp", 2.80, 0.2, {"a800": 7.40, "h800": 7.78, "h200": 9.79}),
}
"""By planner."""


def verdicts(planners: list[str], profile: str) -> dict[str, str]:
    """Of these planners those that are published, each with its verdict under a profile."""
    return {name: CLAIMS[name].told(profile) for name in planners if name in CLAIMS}
