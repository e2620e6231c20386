"""Documents that a plan has in several pieces, each in a round of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Span, Work


def pieces_of_plan(plan: Plan) -> dict[int, tuple[Span, ...]]:
    """Return all pieces, in order, of every document that the plan has in more than one."""
    found: dict[int, list[Span]] = {}
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            for span in current.work[0].spans():  # all stages of a pipeline work on the same tokens
                if span.tokens < plan.documents[span.document]:
                    found.setdefault(span.document, []).append(span)
    return {document: tuple(sorted(spans)) for document, spans in found.items()}


def pieces_of_round(work: Work, pieces: Mapping[int, tuple[Span, ...]]) -> dict[int, tuple[Span, ...]]:
    """Return the pieces of those documents of a round that are in several; refuse what cannot be true."""
    found = {}
    for span in work.spans():
        every = pieces.get(span.document, ())
        if len(every) < 2:
            continue
        edges = [0, *(piece.stop for piece in every)]
        told = [(piece.start, piece.stop) for piece in every]
        if told != list(pairwise(edges)) or any(piece.tokens < 1 for piece in every):
            raise SeqloomError(
                f"document {span.document} in pieces {told}: pieces begin at token 0 and follow each other without "
                "gaps; give all pieces of the document in order, as pieces_of_plan does"
            )
        if span not in every:
            raise SeqloomError(
                f"document {span.document} is at tokens {span.start} to {span.stop} in this round, its pieces are "
                f"{told}: give the pieces of the plan that the round belongs to"
            )
        found[span.document] = every
    return found


def check_documents(work: Work) -> None:
    """Refuse a round with two pieces of one document."""
    seen: set[int] = set()
    for document, _, _ in work.spans():
        if document in seen:
            raise SeqloomError(
                f"document {document} is twice in one round's work; a document, or a piece of one, belongs to one "
                "group of a round: give the other piece to another round"
            )
        seen.add(document)
