"""Pieces of a history: which there are, which are asked for together, and what a fetch reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reclaim.data.fetch.prometheus import job
from reclaim.data.fetch.prometheus.client import Access
from reclaim.data.fetch.prometheus.job import HistoryConfig, fetch_history, in_words, metrics_of
from reclaim.data.fetch.prometheus.probe import Plan
from reclaim.data.fetch.prometheus.reading import read_series
from reclaim.data.traces.dialect import load_dialect
from reclaim.data.traces.history import PIECE_S, RawSeries, moment_s
from tests.data.fetch.prometheus.answering import Answer, of_plan, ok, serving

NOWHERE = Access("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("days", "end", "now", "start", "past"),
    [
        (0.2, "2026-11-02T15:30", "2026-11-03", "2026-11-02T10:00", "2026-11-02T14:00"),  # 2.4 pieces
        (0.3, "2026-11-02T14:00", "2026-11-03", "2026-11-02T06:00", "2026-11-02T14:00"),  # 3.6 pieces
        (1 / 12, "2026-11-05", "2026-11-02T14:10", "2026-11-02T12:00", "2026-11-02T14:00"),  # an end to come
        (1 / 12, None, "2026-11-02T14:10", "2026-11-02T12:00", "2026-11-02T14:00"),
        (1 / 12, None, "2026-11-02T14:09", "2026-11-02T10:00", "2026-11-02T12:00"),  # the last one may not be whole
    ],
)
def test_a_history_has_whole_pieces_up_to_its_end_or_to_what_has_been_complete_for_ten_minutes(
    days: float, end: str | None, now: str, start: str, past: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.data.fetch.prometheus.job.time.time", lambda: moment_s(now) + 0.5)
    found = job._range(HistoryConfig(NOWHERE, days=days, end=end))
    assert found == (moment_s(start), moment_s(past))


def test_pieces_that_are_asked_for_together_follow_each_other() -> None:
    left = [k * PIECE_S for k in (0, 1, 3, 4, 5, 6)]
    assert [[k // PIECE_S for k in group] for group in job._groups(left, 3)] == [[0, 1], [3, 4, 5], [6]]


def test_a_fetch_reports_what_it_wrote_and_the_share_that_is_there_and_asks_by_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pieces, of which the first two are fetched again."""
    past_s = moment_s("2026-11-02")
    cpu = load_dialect("kubernetes").metrics[0]
    planned: list[float] = []

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if (answer := of_plan(path, headers)) is not None:
            return answer
        there = cpu.name in headers["body"]
        values = [[moment, "1"] for moment in range(past_s - 3 * PIECE_S, past_s, 60)]
        one = {"metric": {"pod": "a", "container": "b"}, "values": values}
        return ok({"resultType": "matrix", "result": [one] if there else []})

    def seen(*of: Any, **more: Any) -> list[RawSeries]:
        if of[1] == cpu and "planned" in more:
            planned.append(more["planned"])
        return read_series(*of, **more)

    monkeypatch.setattr(job, "read_series", seen)
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 1)
    shares: list[float] = []
    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=0.25, end="2026-11-02", transport="query")
        fetch_history(config, tmp_path / "out")
        for path in sorted((tmp_path / "out" / "samples").iterdir())[:2]:
            path.unlink()
        report = fetch_history(config, tmp_path / "out", progress=shares.append)
    written = sorted((tmp_path / "out" / "samples").iterdir())[:2]
    assert (report.fetched, report.samples) == (2, 240)
    assert report.n_bytes == sum(path.stat().st_size for path in written)
    assert shares == pytest.approx([2 / 3, 1.0])
    assert planned == pytest.approx([36.0] * 5)  # 3 samples in ten minutes


def test_a_namespace_and_a_cluster_narrow_each_metric_and_no_namespace_one_of_the_cell() -> None:
    dialect = load_dialect("kubernetes")
    found = metrics_of(dialect, HistoryConfig(NOWHERE, namespace="shop|pay", cluster="cluster=eu=1"))
    narrowed = {metric.role: [str(one) for one in metric.where][-2:] for metric in found}
    assert narrowed["cpu"] == ['namespace=~"shop|pay"', 'cluster="eu=1"']
    assert narrowed["allocatable"][-1] == 'cluster="eu=1"'
    of_cell = {metric.role for metric in dialect.metrics if metric.cell}
    assert {role for role, where in narrowed.items() if not any("shop" in one for one in where)} == of_cell
    assert "allocatable" in of_cell


def test_a_plan_is_one_line_of_its_samples_bytes_and_minutes() -> None:
    plan = Plan("version 3.1.0", "chunks", (), (), 168, 1_234_567, 4_938_268, 90.0)
    assert in_words(plan) == (
        "pieces of two hours: 168, by chunks (server version 3.1.0): about 1,234,567 samples, 5 MB, 1.5 minutes"
    )
