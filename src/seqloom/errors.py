"""Errors that users see: a message with the value, the rule and the way out."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any


class SeqloomError(ValueError):
    """A request that cannot be met. The command line prints it without a traceback and exits with code 2."""

    exit_code = 2


class LeftEarly(SeqloomError):  # noqa: N818 - nothing went wrong
    """A run was asked to leave by a signal and has done so: what it has done, and how it goes on.

    The exit code is EX_TEMPFAIL of sysexits.h: try again later.
    """

    exit_code = 75


class MemoryBudgetError(SeqloomError):
    """A model or a document that the memory of a rank does not hold."""


class LostRankError(SeqloomError):
    """Another rank is gone, or does not answer."""


def unknown_name(kind: str, name: str, options: Iterable[str]) -> SeqloomError:
    """Build the error for the name of a `kind`, such as ``"model"``, that is not an option; offer the nearest ones."""
    legal = sorted(options)
    near = difflib.get_close_matches(name.lower(), [option.lower() for option in legal], n=3, cutoff=0.5)
    nearest = [option for option in legal if option.lower() in near]
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"known: {', '.join(legal)}"
    return SeqloomError(f"unknown {kind} {name!r}; {hint}")


def how_to_drop(tokens: int) -> str:
    """Return how to leave out what is longer, on a command line and in the config of a run: part of a message."""
    return f"drop longer sequences (--max-length {max(tokens, 1)}; of a run data.max_length and data.too_long)"


def import_extra(purpose: str, extra: str, *modules: str, otherwise: str = "") -> Any:
    """Import a package of an optional extra, and modules of it; return the first, or say how to install it.

    `purpose` begins the message and `otherwise` ends it: another way out.
    """
    try:
        loaded = [importlib.import_module(module) for module in modules]
        return loaded[0]
    except ImportError as error:
        raise SeqloomError(
            f"{purpose} needs the package {modules[0]!r} ({error}); install the extra {extra!r}: "
            f"pip install 'seqloom[{extra}]'{otherwise}"
        ) from None


class PlanError(SeqloomError):
    """A plan, or a part of one, that breaks a rule.

    Attributes:
        rule: short name of the broken rule, as listed in ``seqloom.plan.RULES``; ``"format"`` when a file
            cannot be read and ``"value"`` when a single value (a layout, a family) cannot be built.
        at: (pp_rank, number of the action in its row) of the step that breaks it, where there is one.
    """

    def __init__(self, message: str, *, rule: str = "value", at: tuple[int, int] | None = None) -> None:
        """Store the rule beside the message, which holds the value, the rule in words and the way out."""
        super().__init__(message)
        self.rule = rule
        self.at = at

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the rule, so that the error survives a trip from a worker process."""
        return (partial(PlanError, rule=self.rule, at=self.at), (str(self),))


def violation(rule: str, value: str, must: str, way_out: str, at: tuple[int, int] | None = None) -> PlanError:
    """Build the error of a broken rule: the value, what must hold, and the nearest legal choice."""
    return PlanError(f"plan rule '{rule}': {value}; {must}; {way_out}", rule=rule, at=at)
