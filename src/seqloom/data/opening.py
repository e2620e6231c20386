"""One door to every source on disk."""

from __future__ import annotations

from pathlib import Path

from seqloom.data.megatron import MegatronSource, without_suffix
from seqloom.data.source import Source
from seqloom.data.store import TokenStore
from seqloom.data.toy import NAME, toy_source
from seqloom.errors import SeqloomError


def open_source(path: str | Path, *, vocabulary: int | None = None) -> Source:
    """Open a token store (a folder), a Megatron pair (its prefix, .bin or .idx), or a made-up corpus (`toy:600`).

    Args:
        path: what to open.
        vocabulary: ids of the model. A Megatron pair needs it; a store that has more is refused.
    """
    if str(path).startswith(NAME):
        return _fitting(toy_source(str(path)), str(path), vocabulary)
    path = Path(path)
    prefix = without_suffix(path)
    if not path.is_dir() and prefix.with_name(prefix.name + ".idx").exists():
        if vocabulary is None:
            raise SeqloomError(f"{str(path)!r} is a Megatron data set, which does not name its vocabulary; give it")
        return MegatronSource(prefix, vocabulary=vocabulary)
    return _fitting(TokenStore(path), str(path), vocabulary)


def _fitting(source: Source, name: str, vocabulary: int | None) -> Source:
    """Return the source, unless it has ids that the model does not."""
    if vocabulary is not None and source.vocabulary > vocabulary:
        raise SeqloomError(
            f"{name!r} was made with {source.vocabulary:,} ids, the model has {vocabulary:,}; "
            "prepare the data with the model's tokenizer"
        )
    return source
