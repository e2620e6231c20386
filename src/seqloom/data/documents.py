"""Documents that a config names in the place of a token store: prepared once, into a store in a cache.

    files, folders, globs, hf:..  --digest of contents and settings-->  CACHE/NAME-DIGEST  --if it is not there: prepare

Whoever names the same documents with the same tokenizer finds the same store: a run that resumes, and its other ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from seqloom.data.hub import HUB, HubDataset, is_saved_dataset
from seqloom.data.megatron import without_suffix
from seqloom.data.prepare import PrepareResult, prepare
from seqloom.data.records import GLOB_SIGNS, RecordFields, file_kind, find_files, is_hidden
from seqloom.data.source import SYNTHETIC
from seqloom.data.store import META, VERSION
from seqloom.data.tokenizers import Tokenizer
from seqloom.errors import SeqloomError

DIGITS = 16
"""Of a digest, in the name of a store."""
HASHED = 1 << 28
"""Bytes of a file from one sign of progress to the next."""

Show = Callable[[str], None]
"""Is told now and then, in words, how far the work has come."""


def names_documents(name: Path | Sequence[Path]) -> bool:
    """Whether names mean documents to be prepared, and no token store, Megatron pair or made-up corpus."""
    if not isinstance(name, Path):
        return True
    text = str(name)
    if text.startswith(HUB):
        return True
    prefix = without_suffix(name)
    if text.startswith(SYNTHETIC) or (name / META).is_file() or prefix.with_name(prefix.name + ".idx").exists():
        return False
    if name.is_dir():
        inside = (path.relative_to(name) for path in name.rglob("*"))
        return is_saved_dataset(name) or any(file_kind(path) and not is_hidden(path) for path in inside)
    return file_kind(name) is not None or (not name.exists() and any(sign in text for sign in GLOB_SIGNS))


def prepare_once(
    names: Path | Sequence[Path],
    cache: Path,
    *,
    tokenizer: Tokenizer | None,
    vocabulary: int,
    fields: RecordFields,
    show: Show,
) -> tuple[Path, PrepareResult | None]:
    """Return the store of these documents, and what preparing it has counted; None: it was there.

    Args:
        names: as `prepare` takes them, and folders that the library datasets has saved.
        cache: folder of the stores.
        tokenizer: for texts and chats. Files of ids need none.
        vocabulary: of ids, where there is no tokenizer.
        fields: which fields of a record are read.
        show: is told of the progress.
    """
    given = [names] if isinstance(names, Path) else list(names)
    inputs, others = find_files(f"{HUB}{each}" if is_saved_dataset(each) else each for each in given)
    title = Path(str(given[0]).removeprefix(HUB)).name + (f" and {len(given) - 1} more" if len(given) > 1 else "")
    size = None if tokenizer is not None else vocabulary
    key = _digest(inputs, tokenizer, size, fields, show)[:DIGITS]
    found = next((path.parent for path in sorted(cache.glob(f"*-{key}/{META}"))), None)
    if found is not None:
        return found, None
    name = re.sub(r"[^A-Za-z0-9-]+", "-", Path(title).name.partition(".")[0]).strip("-") or "documents"
    store = cache / f"{name}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    show(f"preparing {title}")
    percent = 0

    def report(share: float) -> None:
        nonlocal percent
        if int(100 * share) > percent:
            percent = int(100 * share)
            show(f"preparing {title}: {percent} %")

    try:
        options = {"tokenizer": tokenizer, "vocabulary": size, "fields": fields}
        done = prepare(inputs, store, **options, progress=report)
    except SeqloomError:
        if (store / META).is_file():  # another process was faster
            return store, None
        raise
    return store, replace(done, other_files=tuple(map(str, others)))


def _digest(
    inputs: Sequence[Path | HubDataset],
    tokenizer: Tokenizer | None,
    vocabulary: int | None,
    fields: RecordFields,
    show: Show,
) -> str:
    """Return a digest of everything that decides what the store holds; not of names, places and times of files."""
    template = None if tokenizer is None or tokenizer.chats is None else tokenizer.chats.digest
    made_by = None if tokenizer is None else {**tokenizer.metadata, "name": None}
    settings = {"version": VERSION, "tokenizer": made_by, "template": template, "vocabulary": vocabulary}
    sha256 = hashlib.sha256(json.dumps(settings | {"fields": asdict(fields)}, sort_keys=True).encode())
    for each in inputs:
        if isinstance(each, HubDataset):
            sha256.update(f"data set {each.digest()}".encode())
            continue
        sha256.update(f"{file_kind(each)} {each.stat().st_size}".encode())
        with each.open("rb") as file:
            while block := file.read(HASHED):
                sha256.update(block)
                if len(block) == HASHED:
                    show(f"reading {each.name}")
    return sha256.hexdigest()
