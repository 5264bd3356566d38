"""Machine peaks, file to file: equal to the EuroSys'21 simulator's answers, and clear about samples it cannot use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data.core.engine.workers import Engine
from reclaim.data.errors import ConfigError, ReclaimError, SchemaError, TraceError
from reclaim.replay.machine_peaks import job as peaks
from reclaim.replay.machine_peaks.job import choose_predictors, predict_peaks
from reclaim.replay.machine_peaks.predictors import PREDICTORS, Bridged, FixedShare, Largest, Limit, Oracle, TaskMaximum

KEYS = ["predictor", "machine", "time_us"]
FEW = {"limit": Limit(), "so_far": TaskMaximum(warm_up=2), "oracle": Oracle(2)}


def frame(machines: tuple[Any, ...] = (3, 1), n: int = 4) -> pd.DataFrame:
    """Return samples of two tasks on each machine, one a second, by machine and time."""
    rng = np.random.default_rng(1)
    rows = [(m, 1_000_000 * t, f"task {k}") for m in machines for t in range(n) for k in range(2)]
    samples = pd.DataFrame(rows, columns=["machine", "time_us", "task"])
    samples["limit"] = 1.0
    samples["usage"] = rng.uniform(0, 1.2, len(samples))
    return samples


def write(folder: Path, samples: pd.DataFrame, **options: Any) -> Path:
    path = folder / "samples.parquet"
    samples.to_parquet(path, index=False, **options)
    return path


def test_the_public_simulators_answers_come_out_to_a_billionth(real_data: Path, tmp_path: Path) -> None:
    golden = real_data / "golden_peak_predictors"
    if not golden.is_dir():
        pytest.skip(f"the simulator's answers are not beside this checkout ({golden.name}/ missing)")
    report = predict_peaks(golden / "samples.parquet", tmp_path / "peaks.parquet")
    expected = pd.read_parquet(golden / "expected.parquet")
    names = set(expected.predictor)
    later = {name for name in PREDICTORS if name.startswith(("trimaran", "coach")) or name.endswith("_bridged")}
    assert names == set(report.predictors) - {"borg_default", "mean"} - later
    ours = pd.read_parquet(tmp_path / "peaks.parquet").query("predictor in @names")
    both = expected.merge(ours, on=KEYS, how="outer", suffixes=("", "_ours"), indicator="side")
    assert (both.side == "both").all()
    assert len(both) == len(expected)
    for column in ("predicted_peak", "total_usage", "limit"):
        assert (both[column] - both[f"{column}_ours"]).abs().max() <= 1e-9, column


@pytest.mark.parametrize("engine", [Engine(workers=3), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_the_bytes_do_not_depend_on_the_engine_nor_on_the_number_of_workers(tmp_path: Path, engine: Engine) -> None:
    samples, done = write(tmp_path, frame(tuple(range(9)), 50), row_group_size=70), list[float]()
    one = predict_peaks(samples, tmp_path / "one", engine=Engine(workers=1))
    several = predict_peaks(samples, tmp_path / "several", engine=engine, progress=done.append)
    assert replace(several, seconds=one.seconds) == one
    assert (tmp_path / "several").read_bytes() == (tmp_path / "one").read_bytes()
    assert done == [pytest.approx(k / 9) for k in range(1, 10)]


def test_a_row_for_each_predictor_machine_and_time_but_where_it_is_undefined(tmp_path: Path) -> None:
    samples = frame()
    report = predict_peaks(write(tmp_path, samples), tmp_path / "deep" / "peaks.parquet", FEW)
    out = pd.read_parquet(tmp_path / "deep" / "peaks.parquet")
    assert list(out.columns) == [*KEYS, "predicted_peak", "total_usage", "limit"]
    assert (report.samples, report.machines, report.predictions) == (16, 2, 20) == (len(samples), 2, len(out))
    sizes = out.groupby(["machine", "predictor"], sort=False).size()
    assert list(sizes.items()) == [((m, p), 2 if p == "oracle" else 4) for m in (3, 1) for p in FEW]
    usage = samples.usage.clip(upper=1).groupby([samples.machine, samples.time_us]).sum()
    limit = out[out.predictor == "limit"].set_index(["machine", "time_us"])
    assert limit.total_usage.to_dict() == pytest.approx(usage.to_dict())
    assert (limit.predicted_peak == 2.0).all()
    said = json.loads(pq.read_schema(tmp_path / "deep" / "peaks.parquet").metadata[b"predictors"])
    assert said["so_far"] == {"kind": "TaskMaximum", "warm_up": 2}
    both = Bridged(Largest((TaskMaximum(warm_up=2), Limit())))
    predict_peaks(tmp_path / "samples.parquet", tmp_path / "both.parquet", {"both": both})
    said = json.loads(pq.read_schema(tmp_path / "both.parquet").metadata[b"predictors"])
    inner = {"kind": "Largest", "of": [{"kind": "TaskMaximum", "warm_up": 2}, {"kind": "Limit"}]}
    assert said["both"] == {"kind": "Bridged", "of": inner, "gap": 2}
    assert not list((tmp_path / "deep").glob("*.partial"))


def test_the_bytes_rest_on_the_samples_and_not_on_how_they_are_cut_or_tasks_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = frame(n=7)
    predict_peaks(write(tmp_path, samples), tmp_path / "a.parquet")
    predict_peaks(write(tmp_path, samples, row_group_size=3), tmp_path / "b.parquet")
    monkeypatch.setattr(peaks, "ROW_GROUP_ROWS", 5)
    turned = samples.sort_values(["machine", "time_us", "task"], ascending=[False, True, False])
    predict_peaks(write(tmp_path, turned), tmp_path / "c.parquet")
    turned["task"] = pd.Categorical(turned.task)
    predict_peaks(write(tmp_path, turned), tmp_path / "d.parquet")
    first, *others = ((tmp_path / f"{name}.parquet").read_bytes() for name in "abcd")
    assert others == [first] * 3


def test_machines_may_have_names(tmp_path: Path) -> None:
    samples = frame(("rack-2", "rack-1"))
    predict_peaks(write(tmp_path, samples), tmp_path / "a.parquet", FEW)
    assert list(pd.read_parquet(tmp_path / "a.parquet").machine.unique()) == ["rack-2", "rack-1"]


@pytest.mark.parametrize("typed", [True, False])
def test_no_samples_give_no_predictions(tmp_path: Path, typed: bool) -> None:
    empty = frame().iloc[:0] if typed else pd.DataFrame(columns=list(peaks.SAMPLE_COLUMNS))
    report = predict_peaks(write(tmp_path, empty), tmp_path / "a.parquet")
    assert (report.samples, report.machines, report.predictions) == (0, 0, 0)
    assert len(pd.read_parquet(tmp_path / "a.parquet")) == 0


def test_the_progress_goes_up_to_one(tmp_path: Path) -> None:
    shares: list[float] = []
    predict_peaks(write(tmp_path, frame((1, 2, 3, 4))), tmp_path / "a.parquet", FEW, progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def _put(column: str, row: int, value: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(samples: pd.DataFrame) -> pd.DataFrame:
        values = samples[column].tolist()
        values[row] = value
        return samples.assign(**{column: pd.Series(values, index=samples.index)})

    return change


BAD: list[tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = [
    (lambda s: s.drop(columns=["usage", "task"]), r"missing columns task, usage; there are machine, time_us, limit"),
    (lambda s: s.assign(usage="much", time_us=0.5), r"time_us must be integers .* got double; usage must be numbers"),
    (lambda s: s.assign(machine=1.5), r"machine must be integers or text, got double"),
    (_put("usage", 9, float("inf")), r"usage: row 9: expected a finite number of at least 0"),
    (_put("usage", 11, -0.1), r"usage: row 11: expected a finite"),
    (_put("limit", 3, -1.0), r"limit: row 3: expected a finite"),
    (_put("limit", 3, None), r"limit: row 3: null"),
    (_put("task", 10, None), r"task: row 10: null"),
    (_put("time_us", 0, -1), r"time_us: row 0: expected a time from 0"),
    (_put("time_us", 7, 2**63 - 1), r"time_us: row 7: expected a time from 0 to below"),
    (_put("time_us", 13, 0), r"time_us: row 13: earlier than the row before; sort the rows by machine and time_us"),
    (_put("machine", 12, 3), r"machine: row 12: 3 again after others; sort the rows by machine and time_us"),
    (_put("task", 11, "task 0"), r"task: row 11: there already at the same machine and time_us"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
@pytest.mark.parametrize("rows", [4, 1 << 16])
def test_samples_that_cannot_be_used_are_named_by_column_and_row(
    tmp_path: Path,
    change: Callable[[pd.DataFrame], pd.DataFrame],
    message: str,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peaks, "ROW_GROUP_ROWS", rows)
    path = write(tmp_path, change(frame()))
    with pytest.raises(SchemaError, match=message):
        predict_peaks(path, tmp_path / "a.parquet", FEW)
    assert list(tmp_path.iterdir()) == [path]


def test_a_nan_is_no_usage(tmp_path: Path) -> None:
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    usage = table["usage"].to_numpy().copy()
    usage[5] = np.nan
    pq.write_table(table.set_column(4, "usage", pa.array(usage)), tmp_path / "s.parquet")
    with pytest.raises(SchemaError, match=r"usage: row 5: expected a finite"):
        predict_peaks(tmp_path / "s.parquet", tmp_path / "a.parquet", FEW)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("machine,time_us")
    with pytest.raises(TraceError, match=r"text.parquet: not a Parquet file"):
        predict_peaks(tmp_path / "text.parquet", tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r"none.parquet: no such file"):
        predict_peaks(tmp_path / "none.parquet", tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r": a folder; expected Parquet with columns machine, time_us"):
        predict_peaks(tmp_path, tmp_path / "a.parquet")
    path = write(tmp_path, frame(n=300), compression="gzip")
    damaged = bytearray(path.read_bytes())
    damaged[400:440] = bytes(40)
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    with pytest.raises(TraceError, match=r"damaged.parquet: damaged \("):
        predict_peaks(tmp_path / "damaged.parquet", tmp_path / "a.parquet")
    assert not list(tmp_path.glob("a.parquet*"))
    for out in (path, tmp_path):
        with pytest.raises(ConfigError, match="expected the name of a new file"):
            predict_peaks(path, out)
    with pytest.raises(ConfigError, match=r"a\.csv: Parquet is written; name a file that ends with \.parquet"):
        predict_peaks(path, tmp_path / "a.csv")


def test_predictors_are_chosen_by_name() -> None:
    assert choose_predictors() == dict(PREDICTORS)
    assert list(choose_predictors(oracle=False)) == [name for name in PREDICTORS if name != "oracle_24h"]
    assert choose_predictors(("borg_default",)) == {"borg_default": FixedShare(0.9)}
    with pytest.raises(ConfigError, match=r"unknown p99; expected any of limit, borg_default"):
        choose_predictors(("limit", "p99"))
    with pytest.raises(ReclaimError, match="--no-oracle leaves none"):
        choose_predictors(("oracle_24h",), oracle=False)


def test_the_verb_prints_what_it_wrote(tmp_path: Path) -> None:
    path = write(tmp_path, frame())
    words = ["peaks", str(path), "--out", str(tmp_path / "a.parquet"), "--predictor", "limit", "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["predictions"], facts["predictors"], facts["samples"]) == (8, ["limit"], 16)
    assert set(pd.read_parquet(facts["peaks"]).predictor) == {"limit"}
