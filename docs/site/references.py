"""Renders the references of the command line, the HTTP API and the Python API as Markdown, out of the code."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from typer.main import get_command

from reclaim.cli.app import app
from reclaim.serving.http.openapi import page
from reclaim.serving.http.routes import PREFIX, routes

MODULES = ("reclaim", "reclaim.serving.client")
"""Modules whose public names are the Python API."""
_JSON, _ARROW = "application/json", "application/vnd.apache.arrow.stream"

_KINDS = {"int": "N", "float": "X", "Path": "PATH"}

Json = dict[str, Any]


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, or nothing without rows; ``head`` names the columns."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" if cells else ""


def command_line() -> str:
    """Return a section per command: what it does, its arguments and options, its examples."""
    return "\n".join(_commands("reclaim", get_command(app)))


def _commands(name: str, command: Any) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for word, one in inner.items():
            yield from _commands(f"{name} {word}", one)
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    shown = " ".join(p.metavar if p.required else f"[{p.metavar}]" for p in arguments)
    yield f"## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n"
    yield f"```text\n{name} {shown + ' ' if shown else ''}[OPTIONS]\n```\n"
    examples = re.findall(r"`([^`]+)`", command.epilog or "")
    yield "```sh\n" + "\n".join(e for e in examples if e.startswith(("reclaim", "torchrun"))) + "\n```\n"
    rows = [[f"`{p.metavar}`", "", p.help or ""] for p in arguments]
    rows += [[_option(p), _default(p.default), _meaning(p)] for p in options]
    yield table("argument, option | default | meaning", rows)


def _option(option: Any) -> str:
    kind = option.type_descriptor.annotation.__name__
    value = "" if option.is_flag else f" {option.metavar or _KINDS.get(kind, 'TEXT')}"
    return ", ".join(f"`{name}{value}`" for name in option.opts)


def _default(value: Any) -> str:
    return "" if value in (None, "", False) else f"`{value}`"


def _meaning(option: Any) -> str:
    variable = f" Environment: `{option.envvar}`." if option.envvar else ""
    return (option.help or "") + variable


def http() -> str:
    """Return a section per call, then one per type of its bodies and answers, from the OpenAPI page."""
    document = page(routes(_no_runtime), PREFIX)
    calls = [_call(path, method, call) for path, item in document["paths"].items() for method, call in item.items()]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    return "\n".join(["## Calls\n", *calls, "## Types\n", *types])


def _no_runtime() -> Any:
    raise AssertionError("the page is made without a model")


def _call(path: str, method: str, call: Json) -> str:
    text = call.get("description") or call["summary"]
    parts = [f"### `{method.upper()} {path}`\n", f"{text}\n"]
    parameters = [p for p in call["parameters"] if "$ref" not in p]
    parts.append(table("parameter | in | type | default | meaning", (
        [f"`{p['name']}`", p["in"], _kind(p["schema"]), _value(p["schema"]), p.get("description", "")]
        for p in parameters)))  # fmt: skip
    for media, content in call.get("requestBody", {}).get("content", {}).items():
        parts.append(f"Body, `{media}`: {_content(content['schema'])}\n")
    answers = call["responses"]
    for media, content in answers.get("200", {}).get("content", {}).items():
        parts.append(f"Answer, `{media}`: {_content(content['schema'])}\n")
    refusals = [[status, answer["description"]] for status, answer in answers.items() if status != "200"]
    parts.append(table("status | when", refusals))
    return "\n".join(part for part in parts if part)


def _content(schema: Json) -> str:
    if described := schema.get("description"):
        return str(described)
    return _kind(schema) + "."


def _type(name: str, schema: Json) -> str:
    required = schema.get("required", [])
    rows = [
        [f"`{field}`", _kind(of), "required" if field in required else _value(of), of.get("description", "")]
        for field, of in schema.get("properties", {}).items()
    ]
    text = (schema.get("description") or "").strip()
    return "\n".join(part for part in (f"### {name}\n", f"{text}\n" if text else "", table(
        "field | type | default | meaning", rows)) if part)  # fmt: skip


def _kind(schema: Json) -> str:
    """Return the type of a value in words, with a link to the section of a named one."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(dict.fromkeys(_kind(kind) for kind in kinds if kind.get("type") != "null"))
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_kind(inner)}" if isinstance(inner, dict) else "object"
    return str(schema.get("type", "any"))


def _value(schema: Json) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def python() -> str:
    """Return a section per module of the Python API, with directives that render its docstrings."""
    return "\n".join(_module(name) for name in MODULES)


def _module(name: str) -> str:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [one for one in dir(module) if not one.startswith("_")]
    found = [(one, getattr(module, one)) for one in names]
    found = [(one, value) for one, value in found if callable(value) and value.__module__.startswith("reclaim.")]
    if not found:
        return ""
    directives = []
    for one, value in found:
        if inspect.isclass(value):
            directives += [
                f".. autoclass:: {name}.{one}",
                "   :members:",
                "   :inherited-members: BaseModel, Exception, tuple",
                "",
            ]
        else:
            directives += [f".. autofunction:: {name}.{one}", ""]
    return f"## `{name}`\n\n```{{eval-rst}}\n" + "\n".join(directives) + "```\n"
