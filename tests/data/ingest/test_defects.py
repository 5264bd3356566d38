"""Tests of the defects of windows, counted by hand on both sides of each bound, and of when they are warned of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.ingest.defects import (
    CPU_ABOVE,
    CPU_BELOW,
    CPU_FAR_BELOW,
    DEFECTS,
    FAR,
    LEGITIMATE,
    LONGER,
    MEMORY_ABOVE,
    MEMORY_BELOW,
    MEMORY_FAR_BELOW,
    OVERLAP,
    SPACED,
    count_defects,
    warnings_of,
)

FALL, TAIL_FALL = (f"{name} fall" for name in (s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES))


def usage(*rows: dict[str, Any]) -> pa.Table:
    """Return windows from 0 to 10, each of a task of its own unless it says otherwise."""
    blank = dict.fromkeys(s.USAGE.names) | {s.COLLECTION_ID: 1, s.START_US: 0, s.END_US: 10}
    return pa.Table.from_pylist([blank | {s.INSTANCE_INDEX: k} | row for k, row in enumerate(rows)], s.USAGE)


def found(*rows: dict[str, Any], longest_us: int | None = None) -> dict[str, int]:
    """Return the defects that any window has."""
    return {name: count for name, count in count_defects(usage(*rows), longest_us).items() if count}


def times(*windows: tuple[int, int], collection: int = 1, index: int = 0) -> list[dict[str, Any]]:
    """Return windows of one task at times."""
    return [{s.START_US: a, s.END_US: b, s.COLLECTION_ID: collection, s.INSTANCE_INDEX: index} for a, b in windows]


def test_a_window_overlaps_if_it_begins_before_the_latest_end_of_its_own_task() -> None:
    assert found(*times((0, 10), (10, 20), (20, 30))) == {}
    assert found(*times((0, 10), (9, 20), (20, 30))) == {OVERLAP: 1}
    assert found(*times((0, 100), (10, 20), (50, 60), (100, 110))) == {OVERLAP: 2}  # the first one lasts
    others = times((0, 100)), times((10, 20), index=1), times((15, 25), collection=2, index=1)
    assert found(*(row for task in others for row in task)) == {}
    assert found(*times((0, 100)), *times((10, 20), collection=2)) == {}


def test_a_window_is_far_if_it_begins_a_hundred_of_its_lengths_after_the_latest_end() -> None:
    assert found(*times((0, 10), (1_010, 1_020))) == {FAR: 1}
    assert found(*times((0, 10), (1_009, 1_019))) == {SPACED: 1}
    assert found(*times((0, 20), (5, 10), (1_015, 1_025))) == {OVERLAP: 1, SPACED: 1}  # since 20, not since 10
    assert found(*times((0, 10)), *times((5_000, 5_010), index=1)) == {}


def test_windows_that_never_follow_each_other_are_longer_than_their_mapping_says() -> None:
    assert found(*times((0, 10), (20, 30), (39, 49))) == {SPACED: 1}
    none = dict.fromkeys(DEFECTS, 0)
    assert warnings_of(none | {SPACED: 90}, 100, mapped=True) == []
    assert warnings_of(none | {SPACED: 91}, 100, mapped=True) == [
        f"91.0% of the windows: {SPACED}; likely windows are longer than window_s of the mapping says, "
        "or most are missing"
    ]
    assert warnings_of(none | {SPACED: 91}, 100, mapped=False) == []


def test_a_window_is_too_long_above_the_longest_of_its_trace_if_that_is_known() -> None:
    assert found(*times((100, 110)), longest_us=10) == {}
    assert found(*times((100, 110)), longest_us=9) == {LONGER: 1}
    assert found(*times((100, 110))) == {}


def test_usage_is_counted_above_twice_its_own_limit_and_a_maximum_below_its_own_mean() -> None:
    limits = {s.CPU_LIMIT: 0.5, s.MEMORY_LIMIT: 0.25}
    assert found(limits | {s.CPU_MEAN: 1.0, s.MEMORY_MEAN: 0.5}) == {}
    assert found(limits | {s.CPU_MEAN: 1.01, s.MEMORY_MEAN: 0.5}) == {CPU_ABOVE: 1}
    assert found(limits | {s.CPU_MEAN: 1.0, s.MEMORY_MEAN: 0.51}) == {MEMORY_ABOVE: 1}
    assert found({s.CPU_MEAN: 9.0, s.MEMORY_MEAN: 9.0}) == {}  # no limit is known
    assert found({s.CPU_MEAN: 0.2, s.CPU_MAX: 0.2, s.MEMORY_MEAN: 0.4, s.MEMORY_MAX: 0.4}) == {}
    assert found({s.CPU_MEAN: 0.2, s.CPU_MAX: 0.1, s.MEMORY_MEAN: 0.4}) == {CPU_BELOW: 1}
    assert found({s.CPU_MEAN: 0.2, s.MEMORY_MEAN: 0.4, s.MEMORY_MAX: 0.3}) == {MEMORY_BELOW: 1}


def test_usage_that_is_never_near_its_limit_is_in_another_unit_where_a_mapping_says_the_units() -> None:
    limits = {s.CPU_LIMIT: 100.0, s.MEMORY_LIMIT: 1024.0}
    assert found(limits | {s.CPU_MEAN: 2.0, s.MEMORY_MEAN: 21.0}) == {}
    assert found(limits | {s.CPU_MEAN: 1.0, s.MEMORY_MEAN: 1.0}) == {CPU_FAR_BELOW: 1, MEMORY_FAR_BELOW: 1}
    assert found({s.CPU_MEAN: 0.0}, {s.CPU_LIMIT: 1.0}) == {}  # no limit, no usage
    none = dict.fromkeys(DEFECTS, 0)
    for name in (CPU_FAR_BELOW, MEMORY_FAR_BELOW):
        assert warnings_of(none | {name: 999}, 1000, mapped=True) == []  # idle tasks
        (line,) = warnings_of(none | {name: 1000}, 1000, mapped=True)
        assert line.startswith(f"100.0% of the windows: {name}; likely usage is in a larger unit than the limit")
        assert warnings_of(none | {name: 1000}, 1000, mapped=False) == []


def test_percentiles_may_be_alike_and_a_window_counts_once_however_often_they_fall() -> None:
    rising, alike = [float(k) for k in range(11)], [1.0] * 11
    falling, late, early = [float(-k) for k in range(11)], [*rising[:10], 8.5], [0.5, *rising[:10]]
    rows = [{s.CPU_PERCENTILES: values} for values in (rising, None, alike, falling, None, late, early)]
    assert found(*rows) == {FALL: 3}
    assert found({s.CPU_TAIL_PERCENTILES: [2.0] * 8 + [1.0]}, {}) == {TAIL_FALL: 1}
    assert count_defects(usage(), 10) == dict.fromkeys(DEFECTS, 0)
    pieces = pa.concat_tables([usage(rows[0]), usage(*rows[3:5]), usage(rows[6])])  # as they are read, not in one
    assert count_defects(pieces, None)[FALL] == 2


def test_a_defect_is_warned_of_above_its_share_of_the_windows_with_the_cause_that_the_reader_can_have() -> None:
    none = dict.fromkeys(DEFECTS, 0)
    assert warnings_of(none, 0, mapped=True) == []
    at_most = none | {OVERLAP: 1, FAR: 50, CPU_BELOW: 50, MEMORY_BELOW: 50, CPU_ABOVE: 25, MEMORY_ABOVE: 25}
    assert warnings_of(at_most | {LONGER: 100}, 100, mapped=True) == []
    for name in (OVERLAP, FAR, CPU_BELOW, MEMORY_BELOW, CPU_ABOVE, MEMORY_ABOVE):
        (line,) = warnings_of(at_most | {name: at_most[name] + 1}, 100, mapped=True)
        assert line.startswith(f"{at_most[name] + 1}.0% of the windows: {name}; likely ")
        (fixed,) = warnings_of(at_most | {name: at_most[name] + 1}, 100, mapped=False)
        assert "mapping" not in fixed
        assert (fixed == line) == (name not in (OVERLAP, FAR))


def test_a_task_may_pass_its_limit_and_be_idle_and_all_else_is_a_defect_of_a_window() -> None:
    assert set(DEFECTS) - set(LEGITIMATE) == {OVERLAP, LONGER, CPU_BELOW, MEMORY_BELOW, FALL, TAIL_FALL}
    assert set(LEGITIMATE) == {CPU_ABOVE, MEMORY_ABOVE, CPU_FAR_BELOW, MEMORY_FAR_BELOW, SPACED, FAR}
