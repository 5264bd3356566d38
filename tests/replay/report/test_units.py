"""The file of sums by unit: written and read alike, the same bytes for the same sums."""

from pathlib import Path

import numpy as np
import pytest

from reclaim.data.errors import DataError
from reclaim.replay.open_loop.metrics import POSITION, STATS, evaluate
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.report.units import EQUAL, UNITS, UnitSums, read_equal, read_units, write_equal, write_units


def random_units(seed: int = 1) -> UnitSums:
    rng = np.random.default_rng(seed)
    fixed = rng.random((4, len(STATS), 2))
    sums = {}
    for name in (("borg", "baseline"), ("borg", "medium"), ("mine", "medium")):
        sums[name] = rng.random((4, len(STATS), 2))
        for stat in ("rows", "granted"):
            sums[name][:, POSITION[stat]] = fixed[:, POSITION[stat]]
    return UnitSums(np.array([3, 5, 7, 2**62]), np.array([True, False, False, True]), sums)


def test_what_is_read_is_what_was_written_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    units = random_units()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_units(units, tmp_path / name)
    assert (tmp_path / "a" / UNITS).read_bytes() == (tmp_path / "b" / UNITS).read_bytes()
    read = read_units(tmp_path / "a" / UNITS)
    assert read.unit.tolist() == units.unit.tolist()
    assert read.unseen.tolist() == units.unseen.tolist()
    assert list(read.sums) == list(units.sums)
    for key, sums in units.sums.items():
        np.testing.assert_array_equal(read.sums[key], sums)


def test_shares_by_resample_are_read_as_they_were_written_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    shares = np.random.default_rng(1).random((2, 11, 2))
    shares[1, 3, 0] = np.nan  # the curve does not reach the budget
    reclaimed = {"borg": {"baseline": shares[0]}, "mine": {"baseline": shares[1], "aggressive": shares[0]}}
    write_equal(reclaimed, tmp_path)
    read = read_equal(tmp_path / EQUAL)
    assert list(read) == [("borg", "baseline"), ("mine", "baseline"), ("mine", "aggressive")]
    for (name, margin), of in read.items():
        np.testing.assert_array_equal(of, reclaimed[name][margin])
    write_equal({}, tmp_path)
    assert read_equal(tmp_path / EQUAL) == {}
    (tmp_path / EQUAL).write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"equal_violation.parquet: damaged.*replay again"):
        read_equal(tmp_path / EQUAL)


def test_only_the_same_task_windows_can_be_paired() -> None:
    units = random_units()
    assert units.same_rows(random_units())
    assert not units.same_rows(random_units(seed=2))
    assert not units.same_rows(UnitSums(units.unit + 1, units.unseen, units.sums))
    assert not units.same_rows(UnitSums(units.unit, units.unseen, {}))


def test_a_damaged_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / UNITS).write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"units.parquet: damaged.*replay again"):
        read_units(tmp_path / UNITS)


def test_the_sums_of_a_replay_add_up_to_its_results(report: ReplayReport) -> None:
    units = read_units(report.folder / UNITS)
    assert len(units.unit) == report.results["dataset"]["test_collections"]
    assert units.unseen.sum() == report.results["dataset"]["unseen_collections"]
    named = {(e["name"], margin) for e in report.results["estimators"] for margin in e["results"]}
    assert set(units.sums) == named
    for e in report.results["estimators"]:
        for margin, measured in e["results"].items():
            assert "units" not in measured
            whole = evaluate(units.sums[e["name"], margin].sum(axis=0))
            assert whole["reclaimed_share"][1] == pytest.approx(measured["all"]["reclaimed_share"]["memory"]["value"])
