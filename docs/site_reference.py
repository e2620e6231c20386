"""The parts of the reference that are made from the code, as MyST Markdown: `make docs` puts them into the pages.

MADE_FROM_CODE["command line"]()
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

PACKAGES = {
    "seqloom": "Plan, simulate, bound",
    "seqloom.describe": "Clusters, models, lengths, batches",
    "seqloom.plan": "Plans",
    "seqloom.cost": "Costs",
    "seqloom.planners": "Planners",
    "seqloom.packing": "Packing of data sets",
    "seqloom.simulate": "Simulation",
    "seqloom.schedules": "Schedules of pipelines",
    "seqloom.view": "Pictures and tables",
    "seqloom.attention": "Attention",
    "seqloom.data": "Data",
    "seqloom.dist": "Ranks and messages",
    "seqloom.models": "Models",
    "seqloom.params": "Parameters",
    "seqloom.engine": "Steps",
    "seqloom.train": "Training runs",
    "seqloom.integrations.transformers": "Hugging Face models",
    "seqloom.integrations.balancing": "Balancing of other trainers",
    "seqloom.integrations.log_probs": "Log-probabilities of completions",
    "seqloom.integrations.lora": "Adapters",
    "seqloom.integrations.megatron": "Megatron-Core",
    "seqloom.integrations.trl": "TRL",
}
"""Packages and modules whose public names the reference of Python has (`__all__`, or all that are defined there), in
the order of their layers."""


# ---- The command line, from typer


def command_line() -> str:
    """Return a section per verb: what it says of itself, its arguments and its options."""
    from typer.main import get_command

    from seqloom.cli import app

    return "\n".join(_verbs(get_command(app), "seqloom"))


def _verbs(group: Any, name: str) -> Iterator[str]:
    for verb, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{name} {verb}")
        else:
            yield _verb(command, f"{name} {verb}")


def _verb(command: Any, name: str) -> str:
    import typer

    words, example = re.split(r"^Examples?:\n", inspect.cleandoc(command.help.replace("\b", "")), flags=re.MULTILINE)
    context = typer.Context(command, info_name=name)
    records = [parameter.get_help_record(context) for parameter in command.params if parameter.name != "help"]
    rows = [f"| `{option}` | {cell(meaning)} |" for option, meaning in filter(None, records)]
    heading = [f"## {name}\n", words.strip(), "", "```text", inspect.cleandoc(example), "```", ""]
    return "\n".join([*heading, "| option | |", "|---|---|", *rows, ""])


# ---- The keys of a config, from the dataclasses of train/config.py


def configuration() -> str:
    """Return a section per table of a config: its keys with types, defaults and meaning."""
    from seqloom.train import config

    sections = {field.name: hint for field, hint in _hints(config.Config)}
    parts = [_section(name, section) for name, section in sections.items()]
    for name, section in sections.items():
        for field, hint in _hints(section):
            for inner in filter(is_dataclass, _parts(hint)):
                parts.append(_section(f"{name}.{field.name}", inner))
    return "\n".join(parts)


def _section(name: str, section: type) -> str:
    lines = [f"## `[{name}]`\n", f"{inspect.getdoc(section)}\n", "| key | type | default | |", "|---|---|---|---|"]
    documented = attribute_docstrings(section)
    for field, hint in _hints(section):
        meaning = cell(documented.get(field.name, ""))
        lines.append(f"| `{field.name}` | {cell(type_words(hint))} | {_default(field, hint)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _hints(section: Any) -> Iterator[tuple[Any, Any]]:
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        yield field, hints[field.name]


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the classes that a type is made of."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _default(field: Any, hint: Any) -> str:
    value = field.default if field.default is not MISSING else getattr(field.default, "default", MISSING)
    if value is MISSING:
        return "required"
    if value is None or value == ():
        return "none"
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return f"`{text or (list(value) if isinstance(value, tuple) else value)}`"


def type_words(hint: Any) -> str:
    """Return a type of a config's key in words: "whole number from 1", `"cosine"` or `"linear"`, "list of path"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _number_words(parts)
    if origin is Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(part) for part in parts if part is not type(None))
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return f"list of {type_words(parts[0]).replace('table', 'tables')}"
        return f"list of {len(parts)}: {type_words(parts[0])}"
    return {bool: "true or false", str: "text", Path: "path", int: "whole number", float: "number"}.get(hint, "table")


def _number_words(parts: tuple[Any, ...]) -> str:
    """Return the kind of a number and its limits."""
    words = [type_words(parts[0])]
    for limit in (each for part in parts[1:] for each in getattr(part, "metadata", ())):
        for key, before in (("ge", "from"), ("gt", "above"), ("le", "up to"), ("lt", "below")):
            if hasattr(limit, key):
                words.append(f"{before} {getattr(limit, key):g}")
    return ", ".join([" ".join(words[:2]), *words[2:]])


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the text below each attribute of a class."""
    [body] = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):  # pyrefly: ignore[missing-attribute]
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[before.target.id] = inspect.cleandoc(after.value.value)  # pyrefly: ignore[missing-attribute]
    return found


# ---- Plan files, from the dataclasses that they are read into


def plan_files() -> str:
    """Return a section per kind of object in a plan file: its keys, their types, and when they are left out."""
    from seqloom.layout import Layout, Route
    from seqloom.plan import Group, Limits, Pipeline, Plan, Stage, StageMicroBatch

    return "\n".join(map(_plan_object, (Plan, Limits, Pipeline, Stage, StageMicroBatch, Group, Route, Layout)))


def _plan_object(kind: type) -> str:
    from seqloom.plan.json import KEYS_OF_LIMITS, OPTIONAL

    words, _, attributes = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    meanings = dict(re.findall(r"^    (\w+): ((?:.|\n(?=     ))+)", attributes, re.MULTILINE))
    usual = OPTIONAL.get(kind, {}) | ({"made_for": None} if kind.__name__ == "Plan" else {})
    lines = [f"## {kind.__name__}\n", words.strip(), "", "| key | type | left out where it is | |", "|---|---|---|---|"]
    for field in fields(kind):
        if field.init:
            default = f"`{usual[field.name]}`" if field.name in usual else ""
            key = KEYS_OF_LIMITS.get(field.name, field.name)
            lines.append(f"| `{key}` | `{cell(str(field.type))}` | {default} | {cell(meanings.get(field.name, ''))} |")
    return "\n".join(lines) + "\n"


# ---- Python, by autodoc


def python_names() -> str:
    """Return a section per package with autodoc's directives for its public names, each where it is at home."""
    return "\n".join(f"## {title}\n\n" + _package(name) for name, title in PACKAGES.items())


def _package(name: str) -> str:
    lines = [f"`import {name}`\n", "````{eval-rst}"]
    for public, thing in sorted(public_names(name).items(), key=lambda item: item[0].lower()):
        kind = "class" if inspect.isclass(thing) else "function"
        path = f"seqloom.api.{public}" if name == "seqloom" and public in ("plan", "simulate") else f"{name}.{public}"
        lines += [f".. auto{kind}:: {path}", *(["   :members:"] if kind == "class" else []), ""]
    return "\n".join([*lines, "````", ""])


def public_names(package: str) -> dict[str, Any]:
    """Return the public classes and functions of a package; of `seqloom` those that no other package has."""
    module, found = import_module(package), {}
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == package]
    for public in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
        thing = getattr(module, public)
        home = str(getattr(thing, "__module__", ""))
        elsewhere = package == "seqloom" and home.rpartition(".")[0] in PACKAGES and not home.startswith("seqloom.api")
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not (elsewhere and home.count(".") > 1):
            found[public] = thing
    return found


def cell(text: str) -> str:
    """Return a text that fits a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


MADE_FROM_CODE: dict[str, Callable[[], str]] = {
    "command line": command_line,
    "configuration": configuration,
    "plan files": plan_files,
    "python": python_names,
}
