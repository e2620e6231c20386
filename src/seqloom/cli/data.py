"""``seqloom data prepare``: make the token store that a training run reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from seqloom.cli import shared

if TYPE_CHECKING:
    from seqloom.data.prepare import PrepareResult, TextUnit
    from seqloom.data.source import TooLong

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make the data that training reads.")

Inputs = Annotated[list[str], Argument(help="Files: .jsonl, .parquet, .txt.", metavar="INPUT")]
Store = Annotated[Path, Option(help="Folder of the store; it must not exist.")]
TokenizerName = Annotated[
    str | None, Option(help="bytes, a tokenizer.json, or a Hugging Face tokenizer folder. Ids need none.")
]
MaxLength = Annotated[int | None, Option(help="Longest document, tokens.")]
Policy = Annotated[str, Option(help="What happens to a longer one: refuse, truncate, drop.")]
Text = Annotated[str | None, Option(help="Field with the text.  [default: text]")]
Prompt = Annotated[str | None, Option(help="Field with the prompt, which the loss leaves out.")]
Answer = Annotated[str | None, Option(help="Field with the answer to it, which the loss counts.")]
Ids = Annotated[str | None, Option(help="Field with token ids.  [default: input_ids]")]
Vocabulary = Annotated[int | None, Option(help="Ids are below this; without it, the tokenizer's.")]
Unit = Annotated[str, Option(help="What a document of a .txt file is: line, or file.")]


@app.callback()
def root() -> None:
    """Make the data that training reads."""


@app.command("prepare")
def prepare(
    inputs: Inputs,
    out: Store,
    tokenizer: TokenizerName = None,
    max_length: MaxLength = None,
    too_long: Policy = "refuse",
    text: Text = None,
    prompt: Prompt = None,
    answer: Answer = None,
    ids: Ids = None,
    vocabulary: Vocabulary = None,
    unit: Unit = "line",
    json: shared.AsJson = False,
) -> None:
    """Make a token store of texts, of prompts with their answers, or of token ids.

    \b
    Example:
        seqloom data prepare books.jsonl chats.parquet --out store --tokenizer bytes --max-length 32768 --too-long drop
    """
    from seqloom.data.prepare import RecordFields, load_tokenizer
    from seqloom.data.prepare import prepare as make

    fields = RecordFields(text, prompt, answer, ids)
    chosen = None if tokenizer is None else load_tokenizer(tokenizer)
    with shared.progress_bar(100, "preparing") as step:
        percent = 0

        def report(share: float) -> None:
            nonlocal percent
            while percent < int(100 * share):
                percent += 1
                step("preparing")

        done = make(
            inputs,
            out,
            tokenizer=chosen,
            vocabulary=vocabulary,
            fields=fields,
            unit=cast("TextUnit", unit),
            max_length=max_length,
            too_long=cast("TooLong", too_long),
            progress=report,
        )
    shared.report(
        json,
        lambda: {**asdict(done), "path": str(done.path), "max_length": max_length, "too_long": too_long},
        lambda _: _print_summary(done, too_long),
    )


def _print_summary(done: PrepareResult, too_long: str) -> None:
    counts = done.counts
    lines = [
        f"{done.documents:,} documents, {done.tokens:,} tokens of which {done.valid:,} count, "
        f"longest {done.longest:,}, vocabulary {done.vocabulary:,}"
    ]
    if counts.empty or counts.nothing_to_learn:
        lines.append(f"left out: {counts.empty:,} empty, {counts.nothing_to_learn:,} with nothing to learn")
    if counts.too_long:
        happened = "truncated" if too_long == "truncate" else "dropped"
        lines.append(f"too long: {counts.too_long:,} {happened}, {counts.tokens_lost:,} tokens lost")
    for line in (*lines, f"wrote {done.path}"):
        typer.echo(line)
