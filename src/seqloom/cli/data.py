"""``seqloom data prepare``: make the token store that a training run reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.data.records import TextUnit
    from seqloom.data.source import TooLong

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make the data that training reads.")


@app.callback()
def root() -> None:
    """Make the data that training reads."""


@app.command("prepare")
def prepare(
    inputs: Annotated[
        list[str],
        Argument(
            help="Files (.jsonl, .parquet, .txt, .jsonl.gz, .txt.gz), folders, globs in quotes, or hf:org/name.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, Option(help="Folder of the store; it must not exist.")],
    tokenizer: Annotated[
        str | None, Option(help="bytes, a tokenizer.json, or a Hugging Face tokenizer folder. Ids need none.")
    ] = None,
    chat_template: Annotated[
        Path | None, Option(help="Jinja file with the template of chats, instead of the tokenizer's own.")
    ] = None,
    max_length: Annotated[int | None, Option(help="Longest document, tokens.")] = None,
    too_long: Annotated[str, Option(help="What happens to a longer one: refuse, truncate, drop.")] = "refuse",
    text: Annotated[str | None, Option(help="Field with the text.  [default: text]")] = None,
    prompt: Annotated[str | None, Option(help="Field with the prompt, which the loss leaves out.")] = None,
    answer: Annotated[str | None, Option(help="Field with the answer to it, which the loss counts.")] = None,
    messages: Annotated[
        str | None,
        Option(help="Field with the messages of a chat; the loss counts the assistant's.  [default: messages]"),
    ] = None,
    ids: Annotated[str | None, Option(help="Field with token ids.  [default: input_ids]")] = None,
    vocabulary: Annotated[int | None, Option(help="Ids are below this; without it, the tokenizer's.")] = None,
    unit: Annotated[str, Option(help="What a document of a .txt file is: line, or file.")] = "line",
    json: shared.AsJson = False,
) -> None:
    """Make a token store of texts, of prompts with their answers, of chats, or of token ids.

    \b
    Example:
        seqloom data prepare books.jsonl more.txt.gz --out store --tokenizer bytes --max-length 32768 --too-long drop
        seqloom data prepare "chats/*.parquet" --out store --tokenizer FOLDER
    """
    from seqloom.data.prepare import prepare as make
    from seqloom.data.records import RecordFields
    from seqloom.data.tokenizers import load_tokenizer

    fields = RecordFields(text, prompt, answer, ids, messages)
    if tokenizer is None and chat_template is not None:
        raise SeqloomError(f"--chat-template {chat_template} without --tokenizer; name a Hugging Face tokenizer folder")
    chosen = None if tokenizer is None else load_tokenizer(tokenizer, chat_template)
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
        lambda _: typer.echo("\n".join(done.lines(too_long))),
    )
