"""Writes recommended requests as patches for kustomize: one component per namespace, requests alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from reclaim.data.core.files import replaced_folder
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Results
from reclaim.replay.experiments.recommend.lines import is_over

KUSTOMIZATION: Final = "kustomization.yaml"
MADE_BY: Final = "# written by `reclaim recommend --patches`, whole each time"
_POD: Final = ("spec", "template", "spec")
_KINDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "Deployment": ("apps/v1", _POD),
    "StatefulSet": ("apps/v1", _POD),
    "DaemonSet": ("apps/v1", _POD),
    "ReplicaSet": ("apps/v1", _POD),
    "CronJob": ("batch/v1", ("spec", "jobTemplate", *_POD)),
}
"""Version of each kind, and the place of the pod in it."""
_IMMUTABLE: Final[Mapping[str, str]] = {
    "Job": "the pods of a Job cannot be changed; set the requests where it is made",
    "Pod": "the requests of a Pod cannot be changed by a patch; set them where it is made",
    "Node": "its pods are static; set the requests in their files on the node",
}
_UNMERGED: Final = "kustomize cannot merge its containers by name, and would replace them all"
"""Reasons of kinds without patches."""
_UNLISTED: Final = (
    "without a request and a limit; may be an init container or a sidecar, which the manifest does not list among its "
    "containers. If it does, pass --patch-containers"
)
_SIDECAR: Final = (
    "a native sidecar; kustomize would start it before the other init containers. Set its requests where it is declared"
)
_ABSENT: Final = (
    "not in the pod that began last, so the manifest seems to have dropped it, and kustomize would add it without an "
    "image. If the manifest has it, pass --patch-containers"
)
_MIB: Final = 2**20
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""Names of objects in Kubernetes: DNS subdomains. They become names of files here."""
_OTHER: Final = re.compile(r"[^a-z0-9_-]+")
"""Characters of a cluster's name that the name of its folder must not contain, so that no file system merges two
folders."""


@dataclass(frozen=True)
class Patches:
    """Patches that were written.

    Attributes
    ----------
    workloads : int
        Objects that are patched.
    left_out : tuple of str
        Objects with requests to change that are not patched, or not whole, each with the reason: their kinds cannot be
        patched, or their containers may not be in the manifest. What is no object to patch and is over is not named.
    """

    workloads: int
    left_out: tuple[str, ...]


def check_target(folder: Path, *, kubernetes: bool, anonymous: bool, containers: str | None = None) -> None:
    """Raise ConfigError where patches cannot be written: of workloads without names, or in place of something else.

    ``containers`` as in ``write_patches``.
    """
    _pattern(containers)
    if not kubernetes or anonymous:
        why = "anonymous" if kubernetes else "not named: patches need a dataset ingested by --trace kubernetes"
        raise ConfigError(f"--patches {folder}: the workloads are {why}")
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or _is_ours(folder))):
        raise ConfigError(f"--patches {folder}: exists and was not written by this command; choose another folder")


def _pattern(containers: str | None) -> re.Pattern[str] | None:
    try:
        return None if containers is None else re.compile(containers)
    except re.error as error:
        raise ConfigError(f"--patch-containers {containers!r}: not a regular expression: {error}") from error


def write_patches(results: Results, folder: Path, *, containers: str | None = None) -> Patches:
    """Write a folder with a kustomize component for each namespace, and replace one that was written before.

    Namespaces of a cluster that has a name are in a folder of the cluster.

    A patch sets requests that are to change and nothing else; where a memory request passes the limit, which no
    container may have, it raises the limit to the request.

    kustomize adds a container that a patch names and the manifest does not, without an image. A container with neither
    a request nor a limit may be such a one, because an earlier history lacks those of init containers, and is left out.
    So is one that the pod that began last runs without: it was renamed or removed. So are native sidecars: kustomize
    moves merged containers to the front of the init containers, which start in their order.

    Parameters
    ----------
    results : Results
    folder : Path
    containers : str or None
        Containers to patch, a regular expression of their whole names. None: those with a request or a limit that the
        pod that began last has.

    Raises
    ------
    ConfigError
        The workloads have no names, the folder holds something else, or ``containers`` is no regular expression.
    """
    named = _pattern(containers)
    check_target(folder, kubernetes=results["kubernetes"], anonymous=results["anonymous"])
    by_object: dict[tuple[Path, str, str], list[Mapping[str, Any]]] = {}
    unlisted: dict[tuple[tuple[Path, str, str], str], list[str]] = {}
    for line in results["workloads"]:
        if is_over(line) and line["kind"] not in _KINDS:
            continue  # there may be thousands
        if _resources(line) and (named is None or named.fullmatch(line["container"] or "")):
            for name in (line["namespace"], line["name"]):
                if not _NAME.fullmatch(name or ""):
                    raise ConfigError(f"--patches {folder}: {name!r} is no name of Kubernetes; is the history damaged?")
            place = Path(_folder_of(line["cluster"] or "")) / line["namespace"]
            key = (place, line["kind"], line["name"])
            why = _SIDECAR if line["sidecar"] else "" if named is not None else _why_not(line)
            if why and line["kind"] in _KINDS:
                unlisted.setdefault((key, why), []).append(line["container"])
            else:
                by_object.setdefault(key, []).append(line)
    left_out = tuple(f"{space}/{name}, a {kind}: {_IMMUTABLE.get(kind, _UNMERGED)}"
                     for space, kind, name in by_object if kind not in _KINDS)  # fmt: skip
    left_out += tuple(f"{', '.join(names)} of {space}/{name}, a {kind}: {why}"
                      for ((space, kind, name), why), names in unlisted.items())  # fmt: skip
    components: dict[Path, list[dict[str, Any]]] = {}
    with replaced_folder(folder) as fresh:
        for (space, kind, name), lines in sorted(by_object.items()):
            if kind in _KINDS:
                path = fresh / space / f"{kind.lower()}-{name}.yaml"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_text(_patch(kind, name, lines)), encoding="utf-8")
                patch = {"path": path.name, "target": {"kind": kind, "name": f"^{name.replace('.', '[.]')}$"}}
                components.setdefault(space, []).append(patch)
        for space, patches in components.items():
            content = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "patches": patches}
            (fresh / space / KUSTOMIZATION).write_text(f"{MADE_BY}\n{_text(content)}", encoding="utf-8")
        (fresh / "README").write_text(f"{MADE_BY}\n", encoding="utf-8")
    return Patches(sum(map(len, components.values())), left_out)


def _folder_of(cluster: str) -> str:
    """Return the folder of a cluster: its name, or the allowed characters of it and a checksum of the whole name."""
    plain = _OTHER.sub("-", cluster.lower()).strip("-")
    return cluster if plain == cluster else f"{plain}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}".strip("-")


def _is_ours(folder: Path) -> bool:
    readme = folder / "README"
    return readme.is_file() and readme.read_text(encoding="utf-8", errors="replace").startswith(MADE_BY)


def _why_not(line: Mapping[str, Any]) -> str:
    """Return why the manifest may not list a container; empty where it seems to."""
    if line["absent"]:
        return _ABSENT
    listed = any(line[r][amount] is not None for r in RESOURCES for amount in ("request", "limit"))
    return "" if listed else _UNLISTED


def _patch(kind: str, name: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    version, place = _KINDS[kind]
    content: dict[str, Any] = {
        "containers": [{"name": _Name(line["container"]), "resources": _resources(line)} for line in lines]
    }
    for key in reversed(place):
        content = {key: content}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": _Name(name)}, **content}


def _resources(line: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the requests of a container that are to change, and limits where a request passes one."""
    requests, limits = {}, {}
    for r in RESOURCES:
        of = line[r]
        if of["recommended"] is None or of["recommended"] == of["request"]:
            continue
        requests[r] = quantity(r, of["recommended"])
        if of["limit"] is not None and of["recommended"] > of["limit"]:
            limits[r] = requests[r]
    return ({"requests": requests} | ({"limits": limits} if limits else {})) if requests else {}


def quantity(resource: str, amount: float) -> str:
    """Return cores or bytes as Kubernetes writes them.

    >>> quantity("cpu", 0.25), quantity("cpu", 2.0), quantity("memory", 256 * 2.0**20), quantity("memory", 1e8)
    ('250m', '2', '256Mi', '100000000')
    """
    if resource == "cpu":
        milli = round(amount * 1000)
        return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"
    whole = round(amount)
    return f"{whole // _MIB}Mi" if whole % _MIB == 0 else str(whole)


class _Name(str):
    """A name, in quotes in YAML: kubectl reads `1e3` and `08` as numbers and `y` as true, PyYAML does not."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Name, lambda dumper, name: dumper.represent_scalar("tag:yaml.org,2002:str", name, style='"'))


def _text(content: Mapping[str, Any]) -> str:
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False))
