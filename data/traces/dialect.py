"""Reads a dialect: a TOML file that names the metrics and labels of a Prometheus from which a history is made."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError

USAGE: Final = ("cpu", "memory", s.PAGE_CACHE)
"""Roles of metrics of usage."""
FACTS: Final = (
    "pod", "owner", "replicaset_owner", "job_owner", "request", "limit", "quality", "restarts", "started",
    "started_usage", "ended_reason", "ended_time", "terminated", "completed", "evicted", "autoscaler",
    "autoscaler_target", "allocatable", "init", "init_request", "init_limit", "init_restarts", "init_ended_reason",
    "synthetic",
)  # fmt: skip
"""Roles of metrics of facts."""
_LABELS: Final = ("namespace", "pod", "container", "node", "cluster")
_SECTIONS: Final = ("labels", "usage", "facts", "tiers")
_MATCHER: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)(=~|!~|!=|=)"([^"\\]*)"')
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Matcher:
    """Condition on a label, as in PromQL; ``kind`` is ``=``, ``!=``, ``=~`` or ``!~``."""

    label: str
    kind: str
    value: str

    def __str__(self) -> str:
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.label}{self.kind}"{value}"'


@dataclass(frozen=True)
class Metric:
    """A metric in a role: the series it is read from.

    Attributes
    ----------
    role, name : str
    where : tuple of Matcher
    needed : bool
        Whether there is no history without it.
    cell : bool
        Whether its series are of no namespace.
    """

    role: str
    name: str
    where: tuple[Matcher, ...] = ()
    needed: bool = False
    cell: bool = False

    @property
    def selector(self) -> str:
        """The series, in PromQL."""
        return f"{self.name}{{{','.join(map(str, self.where))}}}"


@dataclass(frozen=True)
class Dialect:
    """A dialect, checked.

    Attributes
    ----------
    labels : mapping of str to str
        Thing → the label that names it; empty for none.
    clusters : tuple of str
        Labels that may distinguish clusters, where ``labels`` names none for them.
    scraper : tuple of str
        Labels that name the scraper.
    preferred : mapping of str to str
        Labels of the scraper that is taken first.
    metrics : tuple of Metric
    tiers : mapping of str to str
        Priority class → tier.
    text : str
        The file itself.
    """

    labels: Mapping[str, str]
    clusters: tuple[str, ...]
    scraper: tuple[str, ...]
    preferred: Mapping[str, str]
    metrics: tuple[Metric, ...]
    tiers: Mapping[str, str]
    text: str

    def named(self, of: Mapping[str, str], thing: str) -> str:
        """Return the name of a thing from a series' labels; empty for none.

        Prometheus renames a label that the scrape sets as well, where it does not honour the exporter's: then
        ``namespace`` is that of kube-state-metrics, and ``exported_namespace`` the pod's.
        """
        label = self.labels[thing]
        return of.get(f"exported_{label}") or of.get(label, "")


def shipped_dialects() -> list[str]:
    """Return the names of the dialects that come with the package."""
    folder = resources.files("reclaim.data.traces") / "dialects"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_dialect(name_or_path: str) -> Dialect:
    """Read a dialect: the name of a shipped one, or a file; ConfigError where there is none or it is wrong."""
    if name_or_path in shipped_dialects():
        text = (resources.files("reclaim.data.traces") / "dialects" / f"{name_or_path}.toml").read_text(
            encoding="utf-8"
        )
        return parse_dialect(text, name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        shipped = ", ".join(shipped_dialects())
        raise ConfigError(f"dialect {name_or_path}: no such file; shipped are {shipped}")
    try:
        return parse_dialect(path.read_text(encoding="utf-8"), name_or_path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"dialect {name_or_path}: not UTF-8 ({error})") from error


def parse_dialect(text: str, name: str) -> Dialect:
    """Return the dialect that a file's text states; ConfigError names all faults."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"dialect {name}: not valid TOML: {error}") from error
    faults = [f"unknown section [{key}]" for key in sorted(raw.keys() - set(_SECTIONS))]
    faults += [f"missing section [{key}]" for key in _SECTIONS[:2] if not isinstance(raw.get(key), dict)]
    labels: dict[str, Any] = raw["labels"] if isinstance(raw.get("labels"), dict) else {}
    faults += [f"labels.{key} must be the name of a label" for key in _LABELS if not isinstance(labels.get(key), str)]
    lists, preferred = {key: labels.get(key, []) for key in ("clusters", "scraper")}, labels.get("preferred", {})
    faults += [
        f"labels.{key} must be a list of labels"
        for key, of in lists.items()
        if not isinstance(of, list) or not all(isinstance(one, str) and _LABEL.fullmatch(one) for one in of)
    ]
    if not isinstance(preferred, dict) or not all(isinstance(value, str) for value in preferred.values()):
        faults.append("labels.preferred must be labels with their values")
    metrics = []
    for section, roles in (("usage", USAGE), ("facts", FACTS)):
        found = raw.get(section, {}) if isinstance(raw.get(section, {}), dict) else {}
        faults += [f"{section}.{role} is unknown (known: {', '.join(roles)})" for role in found if role not in roles]
        for role in (role for role in roles if role in found):
            try:
                metrics.append(_metric(role, found[role]))
            except ValueError as error:
                faults.append(f"{section}.{role}: {error}")
    if not faults and metrics[0].role != USAGE[0]:
        faults.append("usage.cpu is missing")
    tiers = raw.get("tiers", {})
    faults += [f"tiers.{key} must be one of {', '.join(s.TIERS)}" for key, value in tiers.items()
               if value not in s.TIERS]  # fmt: skip
    if faults:
        raise ConfigError(f"dialect {name}: {'; '.join(faults)}")
    return Dialect(
        {key: labels[key] for key in _LABELS}, tuple(lists["clusters"]), tuple(lists["scraper"]), dict(preferred),
        tuple(metrics), dict(tiers), text,
    )  # fmt: skip


def _metric(role: str, raw: Any) -> Metric:
    if not isinstance(raw, dict) or not isinstance(raw.get("metric"), str) or not _NAME.fullmatch(raw["metric"]):
        raise ValueError('expected { metric = "NAME" }')
    if unknown := sorted(raw.keys() - {"metric", "where", "needed", "cell"}):
        raise ValueError(f"unknown {', '.join(unknown)}")
    where = []
    for text in raw.get("where", []):
        match = _MATCHER.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f'{text!r} is no matcher such as container!="POD"')
        where.append(Matcher(*match.groups()))
    return Metric(role, raw["metric"], tuple(where), bool(raw.get("needed")), bool(raw.get("cell")))
