"""The one error type users see: a message with the value, the rule and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SeqloomError(ValueError):
    """A request that cannot be met. The command line prints it without a traceback and exits with code 2."""


def unknown(kind: str, name: str, options: Iterable[str]) -> SeqloomError:
    """Build the error for a name that is not in a list, offering the nearest ones.

    Args:
        kind: what is being named, for example ``"model"``.
        name: what was asked for.
        options: every legal name.
    """
    legal = sorted(options)
    near = difflib.get_close_matches(name.lower(), [option.lower() for option in legal], n=3, cutoff=0.5)
    nearest = [option for option in legal if option.lower() in near]
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"known: {', '.join(legal)}"
    return SeqloomError(f"unknown {kind} {name!r}; {hint}")
