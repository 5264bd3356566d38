"""Reads and lists settings: TOML files and ``--set key=value``, checked against the rooms' own dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from reclaim.data.core.prose import kind_in_words
from reclaim.data.errors import ConfigError

C = TypeVar("C")


def load_config(kind: type[C], file: Path | None = None, assignments: Sequence[str] = ()) -> C:
    """Return the settings: the defaults of ``kind``, then the file, then the assignments.

    Parameters
    ----------
    kind : type
        A frozen dataclass; nested dataclasses are TOML tables.
    file : Path or None
        TOML.
    assignments : sequence of str
        ``key=value`` with dots between nested names; the value is TOML (``fit.epochs=5``), or else a plain word.

    Raises
    ------
    ConfigError
        The file is missing or not TOML, or a key is unknown, or a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise ConfigError(f"{file}: {'a folder; name a file in it' if file.is_dir() else 'no such file'}")
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from error
        _build(kind, values, str(file), ())
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r}: expected key=value")
        _assign(values, key.strip().split("."), _value(text.strip()), assignment)
    return _build(kind, values, "--set", ())


def config_from(kind: type[C], settings: Mapping[str, Any]) -> C:
    """Return the settings: the defaults of ``kind``, then those given by name, as ``{"fit.epochs": 5}``.

    Raises
    ------
    ConfigError
        A name is unknown, or a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise ConfigError(f"settings: expected a mapping of names to values, got {settings!r}")
    for name, value in settings.items():
        _assign(values, name.split("."), value, name)
    return _build(kind, values, "settings", ())


@dataclass(frozen=True)
class Setting:
    """A setting as ``--set`` names it, its default and its meaning, as texts."""

    name: str
    default: str
    meaning: str


def settings_of(kind: type[Any], prefix: str = "") -> list[Setting]:
    """Return the settings of a dataclass in order, those of a nested one under dotted names."""
    defaults, meanings = kind(), meanings_of(kind)
    found = []
    for field in dataclasses.fields(kind):
        value, name = getattr(defaults, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found += settings_of(type(value), f"{name}.")
        else:
            found.append(Setting(name, default_text(value), meanings[field.name]))
    return found


def default_text(value: object) -> str:
    """Return a default as a reader writes it; ``none`` for an empty one."""
    if isinstance(value, tuple | Mapping):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def meanings_of(kind: type[Any]) -> dict[str, str]:
    """Return field → docstring of a class and its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, line in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                meanings[ast.unparse(field.target)] = " ".join(str(line.value.value).replace("``", "`").split())
    return meanings


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(values: dict[str, Any], path: list[str], value: Any, assignment: str) -> None:
    """Put a value under its dotted name; a table adds to the settings already there."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {assignment!r}: {name} is a value, not a table")
    if isinstance(value, Mapping):
        for name, of in value.items():
            _assign(values, [path[-1], name], of, assignment)
        values.setdefault(path[-1], {})  # an empty table
    else:
        values[path[-1]] = value


def _build(kind: type[C], values: Mapping[str, Any], where: str, path: tuple[str, ...]) -> C:
    assert dataclasses.is_dataclass(kind)
    types_ = get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1) or [
                f"{table}.{key}"
                for table in names
                if dataclasses.is_dataclass(of := types_[table]) and key in {f.name for f in dataclasses.fields(of)}
            ]
            hint = f"did you mean {'.'.join((*path, close[0]))!r}?" if close else f"known are {', '.join(names)}"
            raise ConfigError(f"{where}: unknown setting {'.'.join((*path, key))!r}; {hint}")
    converted = {key: _convert(types_[key], value, where, (*path, key)) for key, value in values.items()}
    try:
        made = kind(**converted)
    except ConfigError as error:  # a message begins with the name of a setting
        raise ConfigError(f"{where}: {''.join(f'{name}.' for name in path)}{error}") from error
    for key, value in converted.items():
        if isinstance(value, float) and not math.isfinite(value):  # results, which hold the settings, are JSON
            raise ConfigError(f"{where}: {'.'.join((*path, key))} must be a finite number, got {value}")
    return made


def _convert(kind: Any, value: Any, where: str, path: tuple[str, ...]) -> Any:
    name = ".".join(path)
    origin, table = get_origin(kind), isinstance(kind, type) and dataclasses.is_dataclass(kind)
    if (table or origin is Mapping) and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} is a table of settings, got {value!r}")
    if table:
        return _build(kind, value, where, path)
    if origin in (Union, types.UnionType):
        option = next(option for option in get_args(kind) if option is not type(None))
        return None if value is None else _convert(option, value, where, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: {name} is a list, got {value!r}")
        return tuple(_convert(get_args(kind)[0], item, where, path) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise ConfigError(f"{where}: {name} must be {kind_in_words(kind)}, got {value!r}")
    return value
