"""Defines the columns of predictions: name, type, unit and meaning of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.schema import RESOURCES
from reclaim.features.targets import TARGETS
from reclaim.serving.answers.encode import SERVED_RULES, peak_position

NAMES: Final = {
    "namespace": (s.NAMESPACE, "namespace of the task; this and the next three columns where the dataset has names"),
    "workload": (s.WORKLOAD, "its workload; for a series its collection, or the task where it has none"),
    "container": (s.CONTAINER, "its container"),
    "task": (s.POD, "its pod; for a series the task itself"),
}
"""Columns with names → columns of the dataset's names, and the meaning."""


def schema_of(levels: Sequence[float], *, named: bool = False) -> pa.Schema:
    """Return the columns of predictions for the quantile levels of a model; metadata as in ``data.schema``.

    ``named`` says whether the tasks have names.
    """
    number, word, unit = pa.float64(), pa.string(), {r: f"trace {r}" for r in RESOURCES}
    rows = [
        (s.COLLECTION_ID, pa.int64(), "id", "collection of the task"),
        (s.INSTANCE_INDEX, pa.int64(), "index", "position of the task in its collection"),
        *((name, word, "text", meaning) for name, (_, meaning) in NAMES.items() if named),
        (s.END_US, pa.int64(), "µs, trace clock", "end of the window after which this is predicted"),
        ("windows", pa.int64(), "count", "windows of the task up to there"),
        ("age_s", number, "s", "time from the task's first window to there"),
        (s.MACHINE_ID, pa.int64(), "id", "machine of that window; null unknown"),
        (s.TIER, word, "name", "priority tier; null unknown"),
        ("margin", word, "name", "safety margin of the reservations"),
    ]
    for r in RESOURCES:
        rows += [
            (f"{r}_limit", number, unit[r], f"{RESOURCE_WORDS[r]} limit of the last window; null unknown"),
            (
                f"{r}_reservation",
                number,
                unit[r],
                f"{RESOURCE_WORDS[r]} to reserve for the horizon; null where the limit is unknown",
            ),
            (f"{r}_rule", word, "name", f"the rule that made it: {', '.join(SERVED_RULES[:-2])}"),
        ]
    rows += [
        ("oom_probability", number, "0..1", "probability of an out-of-memory event within the horizon"),
        ("peak_cpu", number, unit["cpu"], "peak CPU within the horizon, at the quantile level nearest to 0.99"),
    ]
    of = {
        "peak_cpu": ("cpu", "peak CPU"),
        **{r: (r, f"{RESOURCE_WORDS[r]} that a reservation has to cover") for r in RESOURCES},
    }
    for target in TARGETS:
        resource, meaning = of[target]
        rows += [
            (
                f"{target}_q{level:g}",
                number,
                unit[resource],
                f"{meaning} within the horizon, at quantile level {level:g}",
            )
            for level in levels
        ]
    return pa.schema([
        pa.field(name, type_, metadata={"unit": unit, "meaning": meaning}) for name, type_, unit, meaning in rows
    ])  # fmt: skip


def flat(answered: pa.Table) -> pa.Table:
    """Return a table of answers (``stateful.as_table``) with the columns of ``schema_of``."""
    levels = [float(level) for level in answered.schema.metadata[b"levels"].split(b",")]
    columns = {name: answered[name] for name in answered.column_names}
    for target in TARGETS:
        vectors = columns[f"{target}_quantiles"]
        columns |= {f"{target}_q{level:g}": pc.list_element(vectors, k) for k, level in enumerate(levels)}
    columns["peak_cpu"] = columns[f"peak_cpu_q{levels[peak_position(levels)]:g}"]
    schema = schema_of(levels)
    return pa.table([columns[field.name].cast(field.type) for field in schema], schema)
