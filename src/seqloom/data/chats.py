"""Chats to ids by a tokenizer's chat template, and which of them the loss counts.

    messages                 what the assistant says
    prompt and completion    what the completion adds to the prompt

A template with marks, `{% generation %}` .. `{% endgeneration %}` around what the assistant says, shows it by itself.
Without marks it follows from prefixes: the ids of the messages before an answer, with the header of the answer
(`add_generation_prompt`), and the ids of the messages up to it, must both be what the whole chat begins with. A
template that writes a message in another way once others follow it (one that leaves out earlier thoughts, for example)
has no such prefixes, and its chats are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqloom.errors import SeqloomError, import_extra

ASSISTANT = "assistant"
"""Role of the messages that the loss counts."""
OPTIONS = ("tools", "chat_template_kwargs")
"""Fields of a record beside its messages: tools that the template lists, and other variables that it reads."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WAY_OUT = (
    "give a template with {% generation %} marks around what the assistant says (--chat-template FILE), or chats that "
    "the template writes the same way in parts"
)


class Chat(NamedTuple):
    """Messages of one document."""

    messages: list[dict[str, Any]]  # each with a role and what the template reads
    prompt: int | None = None  # the loss counts what follows so many messages; None: what the assistant says
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed; what the template is given beside the messages

    @property
    def size(self) -> int:
        """Characters, about."""
        return sum(len(str(value)) for message in self.messages for value in message.values())


@dataclass(slots=True, eq=False)
class ChatTemplate:
    """The chat template of a Hugging Face tokenizer.

    Attributes:
        used: entry of meta.json once chats were encoded: a digest of every template, and how answers were found.
    """

    tokenizer: Any
    template: str | None = None  # instead of the tokenizer's own
    used: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, path: str | Path | None) -> ChatTemplate | None:
        """Return the template in a file, else the tokenizer's own; None: it has none."""
        if path is None:
            return cls(tokenizer) if tokenizer.chat_template else None
        try:
            return cls(tokenizer, Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SeqloomError(f"chat template {str(path)!r} cannot be read ({reason}); name a Jinja file") from None

    @property
    def digest(self) -> str:
        """Digest of the template, or of all that the tokenizer has."""
        return hashlib.sha256(repr(self.template or self.tokenizer.chat_template).encode()).hexdigest()

    def encode(self, chat: Chat, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a chat, int64[n], and whether the loss counts each, bool[n]; `where` is for messages."""
        import_extra("a chat template", "hf", "jinja2")
        fixed = {*signature(self.tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
        if fixed & {*chat.options}:
            raise SeqloomError(
                f"{where}: {min(fixed & {*chat.options})!r} in chat_template_kwargs, which is no variable of a "
                "template; take it out"
            )
        try:
            text = self.tokenizer.get_chat_template(self.template, chat.options.get("tools"))
            marked = MARKS.search(text) is not None
            self.used[hashlib.sha256(text.encode()).hexdigest()] = "marks" if marked else "prefixes"
            if chat.prompt is None and marked:
                done = self._apply(chat, len(chat.messages), return_assistant_tokens_mask=True)
                return np.array(done["input_ids"], dtype=np.int64), np.array(done["assistant_masks"], dtype=bool)
            return self._by_prefixes(chat, where)
        except SeqloomError:
            raise
        except Exception as error:  # whatever a template raises for messages that it does not take
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise SeqloomError(f"{where}: the chat template cannot write this chat ({reason}); correct it") from None

    def _by_prefixes(self, chat: Chat, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Find what the loss counts by encoding the chat up to every answer."""
        count = len(chat.messages)
        ids = np.array(self._apply(chat, count)["input_ids"], dtype=np.int64)
        mask = np.zeros(len(ids), dtype=bool)
        answers = [number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        spans = [(chat.prompt, count)] if chat.prompt is not None else [(number, number + 1) for number in answers]
        for start, stop in spans:
            if not start:
                raise SeqloomError(
                    f"{where}: nothing comes before the answer, so the template does not show where it begins; begin "
                    "with another message, or give a template with {% generation %} marks (--chat-template FILE)"
                )
            first = self._prefix(chat, start, ids, where, add_generation_prompt=True)
            mask[first : len(ids) if stop == count else self._prefix(chat, stop, ids, where)] = True
        return ids, mask

    def _prefix(self, chat: Chat, count: int, ids: np.ndarray, where: str, **options: bool) -> int:
        """Return the number of ids of the first messages, which must be what the whole chat begins with."""
        begin = self._apply(chat, count, **options)["input_ids"]
        if ids[: len(begin)].tolist() != begin:
            raise SeqloomError(
                f"{where}: by its chat template the first {count} of {len(chat.messages)} messages are not what the "
                f"whole chat begins with, so it does not show what the assistant says; {_WAY_OUT}"
            )
        return len(begin)

    def _apply(self, chat: Chat, count: int, **options: bool) -> Any:
        """Return the encoding of the first messages."""
        return self.tokenizer.apply_chat_template(
            chat.messages[:count],
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            tokenizer_kwargs={"return_attention_mask": False},
            **options,
            **chat.options,
        )


def parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a field; refuse what no template could write, and what is not text."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise SeqloomError(f"{where}: not a list of messages, each an object with role and content; correct it")
    messages = without_nulls(value)
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            has = ", ".join(map(repr, message)) or "nothing"
            raise SeqloomError(f"{where}, message {number}: no 'role' that is a text, it has {has}; give it one")
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                shown = repr(part if isinstance(content, list) else content)
                shown = shown if len(shown) <= 60 else shown[:57] + "..."
                raise SeqloomError(
                    f"{where}, message {number}: content {shown} is not text, and nothing else is trained on; leave "
                    "the record out"
                )
    return messages


def parse_options(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a record gives its template beside the messages: tools (also as JSON text) and other variables."""
    tools, more = (without_nulls(value.get(name)) for name in OPTIONS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise SeqloomError(f"{where}, field 'tools': not valid JSON ({error}); correct it") from None
    if not isinstance(tools or [], list) or not isinstance(more or {}, dict):
        raise SeqloomError(f"{where}: 'tools' must be a list and 'chat_template_kwargs' an object; correct them")
    return {**({"tools": tools} if tools else {}), **(more or {})}


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at any depth: columns of Parquet have every key in every row."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value
