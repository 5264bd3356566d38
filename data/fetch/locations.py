"""Addresses of the public traces: the only module that names a host, a bucket or an object.

Sources: "Google cluster-usage traces v3", section "Accessing the trace data"; "Google cluster-usage traces: format +
schema", v2.1, sections "File format" and "Downloading the data"; Alibaba ``trace_201708.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Published:
    """The published form of a trace.

    Attributes
    ----------
    base_url : str
        Prefix of an object's path, with ``{cell}`` for a cell. Empty where no address is public.
    objects : mapping of str to str
        Table → path of its objects; ``{shard}`` and ``{shards}`` are formatted as integers.
    shards : mapping of str to int
        Table → number of its objects, where the trace's documents state it; otherwise found by requests.
    cells : tuple of str
        Published cells; empty for a trace of one cell.
    always : tuple of str
        Paths fetched along with any table.
    checksums : str
        Path of the published ``sha256sum`` list; empty if there is none.
    how : str
        The way to the address, for the message where ``base_url`` is empty.
    """

    base_url: str
    objects: Mapping[str, str]
    shards: Mapping[str, int]
    cells: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    checksums: str = ""
    how: str = ""


_V3_TABLES: Final = ("collection_events", "instance_events", "machine_events", "machine_attributes", "instance_usage")
_V2_SHARDS: Final = {
    "job_events": 500, "task_events": 500, "machine_events": 1, "machine_attributes": 1, "task_constraints": 500,
    "task_usage": 500,
}  # fmt: skip
_ALIBABA_TABLES: Final = (
    "server_event", "server_usage", "batch_task", "batch_instance", "container_event", "container_usage",
)  # fmt: skip

TRACES: Final[Mapping[str, Published]] = MappingProxyType({
    "google-v3": Published(
        base_url="https://storage.googleapis.com/clusterdata_2019_{cell}",
        objects={table: f"{table}-{{shard:012d}}.json.gz" for table in _V3_TABLES},
        shards={},
        cells=tuple("abcdefgh"),
    ),
    "google-v2.1": Published(
        base_url="https://storage.googleapis.com/clusterdata-2011-2",
        objects={table: f"{table}/part-{{shard:05d}}-of-{{shards:05d}}.csv.gz" for table in _V2_SHARDS},
        shards=_V2_SHARDS,
        always=("schema.csv",),
        checksums="SHA256SUM",
    ),
    "alibaba-2017": Published(
        base_url="",
        objects={table: f"{table}.csv" for table in _ALIBABA_TABLES},
        shards=dict.fromkeys(_ALIBABA_TABLES, 1),
        how="the trace's page on GitHub (alibaba/clusterdata, cluster-trace-v2017) gives the link after a short survey",
    ),
})  # fmt: skip
"""Name on the command line → published form of that trace."""
