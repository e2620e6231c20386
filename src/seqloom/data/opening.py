"""One door to every source on disk."""

from __future__ import annotations

from pathlib import Path

from seqloom.data.megatron import MegatronSource, without_suffix
from seqloom.data.source import Source
from seqloom.data.store import TokenStore
from seqloom.errors import SeqloomError


def open_source(path: str | Path, *, vocabulary: int | None = None) -> Source:
    """Open a token store (a folder) or a Megatron pair (its prefix, .bin or .idx).

    Args:
        path: what to open.
        vocabulary: ids of the model. A Megatron pair needs it; a store that has more is refused.
    """
    path = Path(path)
    prefix = without_suffix(path)
    if not path.is_dir() and prefix.with_name(prefix.name + ".idx").exists():
        if vocabulary is None:
            raise SeqloomError(f"{str(path)!r} is a Megatron data set, which does not name its vocabulary; give it")
        return MegatronSource(prefix, vocabulary=vocabulary)
    store = TokenStore(path)
    if vocabulary is not None and store.vocabulary > vocabulary:
        raise SeqloomError(
            f"{str(path)!r} was made with {store.vocabulary:,} ids, the model has {vocabulary:,}; "
            "prepare the data with the model's tokenizer"
        )
    return store
