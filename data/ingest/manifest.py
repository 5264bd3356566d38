"""Writes the manifest of a dataset, and decides whether an existing dataset is the requested one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.files import content_sha256, file_sha256
from reclaim.data.core.stores.places import reached
from reclaim.data.dataset import FORMAT_VERSION, Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.shard import REJECTS, Shard
from reclaim.data.traces.source import Source

_NATURES: Final = {"COMPOSED.json": "composed of parts of real traces (semi-synthetic)", "SYNTHETIC.json": "synthetic"}
"""Marker file in a source folder → the nature of its dataset, which every report names."""


def options_of(source: Source, buckets: int) -> dict[str, Any]:
    """Return everything except the input files that decides a dataset's bytes."""
    return {"trace": source.trace, "buckets": buckets, **source.options}


def fingerprint_of(source: Source, buckets: int, checksums: dict[str, str]) -> str:
    """Return the hash of a dataset's format, options and inputs."""
    return content_sha256({"format": FORMAT_VERSION, "options": options_of(source, buckets), "inputs": checksums})


def check_there(
    out: Path, source_folder: Path, source: Source, buckets: int, files: list[Path], *, skip_damaged: bool
) -> Dataset:
    """Return the dataset at ``out`` if these files and options would make the same one.

    Raises
    ------
    ConfigError
        It is not a dataset, or another one; the message says what differs.
    """
    try:
        dataset = Dataset.open(out)
    except ConfigError as error:
        raise ConfigError(f"{out}: exists and is no dataset; choose another folder or remove it") from error
    remedy = "choose another folder or remove it"
    there, asked = dataset.manifest["options"], options_of(source, buckets)
    if other := sorted(name for name in there.keys() | asked.keys() if there.get(name) != asked.get(name)):
        raise ConfigError(
            f"{out}: holds a dataset made from other files or options than asked for (changed: {', '.join(other)}); "
            f"{remedy}"
        )
    named = {file.relative_to(source_folder).as_posix(): file for file in files}
    entries = {entry["file"]: entry for part in ("inputs", "damaged") for entry in dataset.manifest[part]}
    changed = sorted(entries.keys() ^ named.keys())
    changed += [name for name, file in named.items() if name in entries and not _is_still(file, entries[name])]
    if changed:
        raise ConfigError(
            f"{out}: holds a dataset made from other files or options than {source_folder} now has "
            f"(changed: {', '.join(changed[:3])}{', …' * (len(changed) > 3)}); {remedy}"
        )
    left_out = [entry["file"] for entry in dataset.manifest["damaged"]]
    if left_out and not skip_damaged:
        raise ConfigError(
            f"{out}: holds a dataset made without the damaged {', '.join(left_out[:3])}{', …' * (len(left_out) > 3)}; "
            f"pass --skip-damaged to go on with it, or repair and {remedy}"
        )
    return dataset


def _is_still(file: Path, entry: dict[str, Any]) -> bool:
    """Return whether a file has the size and checksum that a manifest's entry recorded."""
    with reached(file):
        return file.stat().st_size == entry.get("bytes") and file_sha256(file) == entry.get("sha256")


def _damaged(file: Path, name: str, reason: str) -> dict[str, Any]:
    """Return the manifest's entry of a damaged file."""
    with reached(file):
        size, checksum = file.stat().st_size, file_sha256(file)
    return {"file": name, "reason": reason.split(": ", 1)[-1], "bytes": size, "sha256": checksum}


def manifest_of(
    source_folder: Path,
    source: Source,
    shards: list[Shard],
    repeated: list[str],
    damaged: list[tuple[str, str]],
    counts: dict[str, int],
    defects: dict[str, int],
    warnings: list[str],
    rejects: dict[str, int],
    not_read: list[str],
    buckets: int,
) -> dict[str, Any]:
    """Return the manifest: inputs with checksums, options, counts, and everything that was not read."""
    checksums = {shard.file: shard.sha256 for shard in shards}
    nature = [label for marker, label in _NATURES.items() if (source_folder / marker).is_file()]
    return {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint_of(source, buckets, checksums),
        "name": source_folder.resolve().name if source.alone is None else Path(source.alone.removesuffix(".gz")).stem,
        "nature": nature[0] if nature else "recorded",
        "options": options_of(source, buckets),
        "buckets": buckets,
        "inputs": [
            {"table": x.table, "file": x.file, "bytes": x.n_bytes, "sha256": x.sha256, "rows": x.rows,
             "rejects": x.rejects}
            for x in shards
        ],
        "damaged": [_damaged(source_folder / file, file, reason) for file, reason in damaged],
        "repeated": repeated,
        "not_read": not_read,
        "counts": counts,
        "rejects": rejects,
        "defects": dict(sum((Counter(x.defects) for x in shards), +Counter(defects))),
        "warnings": warnings,
        "lacks": sorted(source.lacks),
        "extras": {table: list(names) for table, names in source.extras.items()},
        "notes": [*source.notes, *source.findings],
    }  # fmt: skip


def notes_of(manifest: dict[str, Any], findings: Sequence[str]) -> list[str]:
    """Return what a reader of a dataset must know, a line each, findings about its trace included; warnings say so."""
    counts, unread, lines = manifest["counts"], manifest["not_read"], list[str]()
    if manifest["rejects"]:
        reasons = sorted(manifest["rejects"].items(), key=lambda item: (-item[1], item[0]))
        most = ", ".join(f"{reason} ({count:,})" for reason, count in reasons[:3]) + ", …" * (len(reasons) > 3)
        lines.append(f"rejected: {most}; rejects/{REJECTS} has the file and number of each line")
    if not counts["usage"]:
        lines.append("no usage windows: the dataset can be inspected, not trained on")
    if counts["windows_without_limit"]:
        why = "no event gives them one above 0" if counts["events"] else "the trace gives them none above 0"
        lines.append(f"{counts['windows_without_limit']:,} windows have no CPU limit: {why}")
    if repeated := counts["duplicate_windows"]:
        lines.append(f"{repeated:,} windows repeat a task and a time of others; one of each is kept")
    if contradicting := counts.get("contradicting_windows", 0):  # an older dataset does not record it
        lines.append(
            f"warning: {contradicting:,} of them have other values than the one that is kept, which is the first "
            "by its values: look for two recordings of one task, a task id that two tasks share, or local times "
            "without a zone in the hour that a change of the clock repeats"
        )
    lines += findings
    lines += [f"warning: {warning}" for warning in manifest.get("warnings", [])]
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        lines.append(f"not read: {', '.join(unread[:3])}{more}")
    return lines
