"""The command line: settings checked by name, mistakes in one line with exit code 2, results as JSON on request."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.request import urlopen

import pytest
from typer.main import get_command

import reclaim as python
from reclaim.cli import app as cli
from reclaim.cli import replay as replays
from reclaim.cli.results import of_tune
from reclaim.config import load_config, settings_of
from reclaim.data.core.files import replaced_file
from reclaim.data.dataset import Dataset, bucket_name
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import TRACES, IngestConfig, ingest
from reclaim.data.traces.series_mapping import shipped_mappings
from reclaim.features.build import FeatureConfig
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.experiments.what_if.measure import WhatIfConfig
from reclaim.training.fitting.tune import TuneReport
from reclaim.training.settings import TrainConfig, shipped_configs
from reclaim.training.tracking import runs as tracking

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def reclaim(command_line: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a runner of the command line in an empty folder, without a record of runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return command_line


def test_settings_come_from_the_defaults_then_the_file_then_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("seed = 7\n[fit]\nepochs = 3\nlearning_rate = 1\n")
    config = load_config(TrainConfig, file, ["fit.epochs=4", "estimator=trees", "by_tier=true"])
    assert (config.seed, config.fit.epochs, config.fit.learning_rate) == (7, 4, 1.0)
    assert (config.estimator, config.by_tier, config.fit.width) == ("trees", True, TrainConfig().fit.width)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("fit.epoch=3", "unknown setting 'fit.epoch'; did you mean 'fit.epochs'"),
        ("epochs=3", "unknown setting 'epochs'; did you mean 'fit.epochs'"),
        ("fit=3", "fit is a table of settings"),
        ("params=0", "params is a table of settings"),
        ("seed=true", "seed must be a whole number, got True"),
        ("fit.learning_rate=true", "fit.learning_rate must be a number, got True"),
        ("fit.epochs=many", "fit.epochs must be a whole number, got 'many'"),
        ("fit.epochs=0", "--set: fit.epochs must be from 1 to 2147483647, got 0"),
        ("seed=-1", "--set: seed must be from 0"),
        ("budgets.aggressive=0", "--set: budgets.baseline and aggressive must satisfy 0 < baseline"),
        ("value.violation=0", "--set: value.violation must be above 0, got 0.0"),
        ("value.violation=1", "--set: value.violation needs core_hour or memory_hour"),
        ("seed", "expected key=value"),
        ("seed.x.y=1", "seed must be a whole number"),
    ],
)
def test_a_wrong_setting_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, [assignment])


def test_a_list_is_of_values_of_its_type_and_blanks_around_a_name_or_a_value_are_none_of_it() -> None:
    assert load_config(WhatIfConfig, None, ["machines=[3, 5]"]).machines == (3, 5)
    assert load_config(WhatIfConfig, None, [" machines = [4] "]).machines == (4,)
    for wrong, message in {
        "3": "machines is a list, got 3",
        "[3, 'x']": "machines must be a whole number, got 'x'",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(WhatIfConfig, None, [f"machines={wrong}"])


@pytest.mark.parametrize("wrong", ["seen_days=inf", "hold_days=inf", "most_over=inf"])
def test_a_number_without_an_end_is_refused_before_results_cannot_hold_it(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set: {wrong.partition('=')[0]} must be a finite number, got inf"):
        load_config(RecommendConfig, None, [wrong])


def test_a_file_with_a_typo_a_value_out_of_range_or_invalid_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[split]\ntrain_shar = 0.5\n")
    with pytest.raises(
        ConfigError, match=r"f.toml: unknown setting 'split.train_shar'; did you mean 'split.train_share'"
    ):
        load_config(FeatureConfig, file)
    for wrong, of in {"split]\ntrain_share": "split.train_share", "sample]\nvalid": "sample.valid"}.items():
        file.write_text(f"[{wrong} = 0")
        with pytest.raises(ConfigError, match=rf"f.toml: {of} must be (between 0 and 1|at least 1), got 0"):
            load_config(FeatureConfig, file)
    file.write_text("= nothing")
    with pytest.raises(ConfigError, match=r"f.toml: not valid TOML"):
        load_config(FeatureConfig, file)
    with pytest.raises(ConfigError, match=r": a folder; name a file in it"):
        load_config(FeatureConfig, tmp_path)
    file.write_bytes(b"\xef\xbb\xbf[split]\ntrain_share = 0.5\n")  # the mark of UTF-8 that some editors write
    assert load_config(FeatureConfig, file).split.train_share == 0.5
    file.write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=r"f.toml: not valid TOML: .*utf-8"):
        load_config(FeatureConfig, file)
    with pytest.raises(ConfigError, match=r"none.toml: no such file"):
        load_config(FeatureConfig, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [("ingest", "trace", TRACES), ("ingest", "mapping", shipped_mappings()), ("train", "config", shipped_configs()),
     ("tune", "config", shipped_configs())],
)  # fmt: skip
def test_the_help_names_all_that_comes_with_the_package(command: str, option: str, names: Sequence[str]) -> None:
    commands: Any = get_command(cli.app)
    (help_,) = (p.help for p in commands.commands[command].params if p.name == option)
    assert [name for name in names if f"`{name}`" not in help_] == []
    if command == "ingest":
        assert [name for name in names if f"``{name}``" not in str(python.ingest.__doc__)] == []


MISTAKES = [
    (("ingest", "nowhere", "out"), "error: nowhere: no such folder"),
    (("ingest", ".", "out"), "no files of a google-v3 trace"),
    (
        ("ingest", ".", "out", "--trace", "google-v9"),
        f"trace must be one of {', '.join(TRACES)}, got 'google-v9'",
    ),
    (("features", "nowhere"), "nowhere: no such folder; `reclaim ingest SOURCE nowhere` makes one"),
    (
        ("features", "."),
        "no manifest.json in it, so no dataset; if it is a trace, `reclaim ingest . DATASET` reads it",
    ),
    (("train", "nowhere"), "nowhere: no such folder"),
    (("train", "nowhere", "--set", "fit.epoch=1"), "unknown setting 'fit.epoch'"),
    (("replay", "margins", "nowhere", "--out", "o", "--no-model"), "nowhere: no such folder"),
    (("replay", "margins", "nowhere", "--out", "o", "--no-model", "--model", "m@1"), "--no-model and --model m@1"),
    (("recommend", "nowhere", "--out", "o", "--no-model", "--model", "m@1"), "--no-model and --model m@1"),
    (("recommend", "nowhere", "--out", "o", "--json", "-f", "csv"), "--json and --format csv both say what to print"),
    (("replay", "frontier", "nowhere", "--out", "o", "--no-model"), "nowhere: no such folder"),
    (("replay", "what-if", "nowhere", "--out", "o", "--set", "margin=wide"), "margin must be one of"),
    (("compare", "--experiment", "margin"), "--experiment: expected one of margins, ratios, "),
    (("synth", "out", "--days", "-1"), "days"),
    (("synth", "out", "--machines", "abc"), "Invalid value for '--machines'"),
    (("serve", "--port", "99999"), "Invalid value for '--port'"),
    (("train", "nowhere", "--estimator", "tree"), "Invalid value for '--estimator': expected one of network, trees, "),
    (("synth", "out", "--machine", "3"), "--machine"),
    (("synth", "out", "--common", "0.6", "--service", "0.4"), "below 1 together, but got common=0.6, service=0.4"),
    (("synth", "out", "--format", "openmetrics", "--common", "0.4"), "--common and --service apply to a cell"),
    (("synth", "out", "--seed"), "Option '--seed' requires an argument; see `reclaim --help`"),
    (("tune", "nowhere"), "nowhere: no such folder"),
    (
        ("predict", "nowhere", "--out", "o.parquet"),
        "nowhere: no such folder; `reclaim ingest SOURCE nowhere` makes one",
    ),
    (("predict", "nowhere", "--out", "o.xlsx"), "o.xlsx: expected the name of a file that ends in .parquet or .csv"),
    (
        ("predict", "nowhere", "--out", "o.csv", "--margin", "wide"),
        "margin must be one of baseline, medium, aggressive",
    ),
    (("peaks", "nothing.parquet", "--out", "o"), "nothing.parquet: no such file"),
    (("peaks", "nothing.parquet", "--out", "o", "--predictor", "p99"), "--predictor: unknown p99; expected any of"),
    (("ingest", "in"), "Missing argument 'DATASET'"),
    (
        ("predict", "nowhere", "--out", "s3://bucket/o.csv"),
        "Invalid value for '--out': s3://bucket/o.csv: expected a place on this machine, got one of a store",
    ),
    (("sinth",), "'sinth'"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda value: " ".join(value) if len(value) < 9 else None)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_written(
    words: tuple[str, ...], message: str, tmp_path: Path, reclaim: Command
) -> None:
    done = reclaim(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_file_system_is_one_line_with_the_path_and_the_remedy(tmp_path: Path, reclaim: Command) -> None:
    (tmp_path / "cell").write_text("not a folder")
    done = reclaim("synth", "cell/sub")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cell/sub: Not a directory; a part of this path is a file, name another place\n"


def _dataset(folder: Path) -> Dataset:
    """Return a dataset of one window, in a folder ``out``, without features."""
    (folder / "in").mkdir()
    (folder / "in" / "a.csv").write_text("vm,t,used\n1,300,1\n")
    (folder / "m.toml").write_text(
        'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "used"\n'
    )
    config = IngestConfig(trace="series", mapping=str(folder / "m.toml"), buckets=1)
    return ingest(folder / "in", folder / "out", config).dataset


def test_a_dataset_with_a_missing_file_is_named_with_the_remedy(tmp_path: Path, reclaim: Command) -> None:
    dataset = _dataset(tmp_path)
    (dataset.path / "usage" / bucket_name(0)).unlink()
    done = reclaim("inspect", "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: out: is damaged or incomplete; delete it and ingest again (")
    assert len(done.stderr.splitlines()) == 1


def test_a_dataset_that_this_user_may_not_read_is_not_to_be_deleted(
    tmp_path: Path, reclaim: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = _dataset(tmp_path)
    (dataset.path / "usage" / bucket_name(0)).unlink()  # as files look in a folder without rights
    monkeypatch.setattr("os.access", lambda path, *_, **__: Path(path).name != "usage")
    done = reclaim("inspect", "out")
    assert (done.returncode, done.stderr) == (
        2, "error: out/usage: Permission denied; give this user the right to it, or name another place\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("recommend", "out", "--out", "o"),
        ("predict", "out", "--out", "o.csv"),
        ("train", "out"),
        ("replay", "margins", "out", "--out", "o", "--no-model"),
    ],
    ids=" ".join,
)
def test_a_dataset_without_features_is_named_with_the_remedy_in_one_line(
    words: tuple[str, ...], tmp_path: Path, reclaim: Command
) -> None:
    _dataset(tmp_path)
    done = reclaim(*words)
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = (line for line in done.stderr.splitlines() if "no model reclaim@champion" not in line)
    assert error == "error: out/features: no such folder; `reclaim features out` makes one"


def test_a_file_that_ends_too_early_is_not_taken_for_an_interrupted_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object, **__: object) -> None:
        raise EOFError("marshal data too short")

    monkeypatch.setattr(Dataset, "open", ended)
    monkeypatch.setattr(sys, "argv", ["reclaim", "inspect", "dataset"])
    with pytest.raises(EOFError, match="marshal data too short"):
        cli.main()


def test_a_stage_prints_its_result_as_one_json_object(reclaim: Command) -> None:
    words = ("synth", "cell", "--machines", "2", "--days", "0.25", "--json")
    first, again = (reclaim(*words) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr
    assert json.loads(first.stdout)["wrote"] is True
    assert json.loads(again.stdout)["wrote"] is False
    made = reclaim("ingest", "cell", "dataset", "--json")
    assert json.loads(made.stdout)["dataset"] == "dataset"  # the path as given
    assert json.loads(made.stdout)["nature"] == "synthetic"
    assert json.loads(made.stdout)["counts"]["usage"] == json.loads(first.stdout)["rows"]["instance_usage"]


@pytest.mark.parametrize(
    ("command", "config"), [("features", FeatureConfig), ("train", TrainConfig), ("tune", TrainConfig)]
)
def test_the_help_of_a_stage_and_the_reference_list_every_setting(command: str, config: type, reclaim: Command) -> None:
    shown = reclaim(command, "--help").stdout
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
    settings = settings_of(config)
    assert {"fit.batch_size", "split.role"} & {s.name for s in settings}
    for setting in settings:
        assert f"\n  {setting.name} = " in shown, setting.name
        assert f"| `{setting.name}` | {setting.default} | {setting.meaning} |" in reference, setting.name
        assert setting.meaning


def test_the_version_is_printed(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "reclaim", "--version"]
    printed = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed == f"reclaim {version('reclaim')}\n"


def test_promote_and_mlflow_without_a_store_and_a_folder_without_a_model_are_one_line(
    tmp_path: Path, reclaim: Command
) -> None:
    for words, message in (
        (("promote", "dataset"), "no model reclaim@candidate in sqlite"),
        (("promote", "reclaim/7"), "reclaim/7: no such dataset; where it is a model, `reclaim promote DATASET --model"),
        (("mlflow",), "no record in sqlite"),
        (("bundle", "reclaim@champion", "out"), "no model reclaim@champion in sqlite"),
        (("replay", "margins", "dataset", "--out", "out", "--model", "./nowhere"), "no model './nowhere'"),
    ):
        done = reclaim(*words)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert "answers in a few seconds" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_mlflow_shows_the_store_of_the_folder_until_it_is_interrupted_or_its_terminal_closes(
    ending: signal.Signals, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        free_port = listening.getsockname()[1]
    store = f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        with tracking.start_run("shown", "a run"):
            pass
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_TRACKING")}
    code = "from reclaim.cli.app import main; main()"

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the command asks, as where a shell began it with "&"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup

    server = subprocess.Popen(
        [sys.executable, "-c", code, "mlflow", "--port", str(free_port)], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=begin,
    )  # fmt: skip
    url = f"http://127.0.0.1:{free_port}/api/2.0/mlflow/experiments/get-by-name?experiment_name=shown"
    try:
        for _ in range(240):
            try:
                with urlopen(url, timeout=10) as answer:
                    found = json.load(answer)
                break
            except OSError:
                time.sleep(0.5)
        assert found["experiment"]["name"] == "shown"
    finally:
        server.send_signal(ending)
        try:
            output, _ = server.communicate(timeout=60)
        finally:
            server.terminate()
    assert server.returncode == 0
    assert "Traceback" not in output


def test_a_replay_names_the_models_of_another_dataset_unless_they_are_portable() -> None:
    def said(**trained_here: bool) -> list[str]:
        kinds = {"a": "network", "b": "network", "builtin": "portable"}
        of = {name: {"kind": kinds[name], "trained_on_this_dataset": here} for name, here in trained_here.items()}
        return replays._of_another_dataset({"inputs": {"bundles": of}})

    assert said(a=True, builtin=False) == said() == []
    assert said(a=False, b=False, builtin=False) == ["trained on another dataset: a, b (--model names others)"]


@pytest.mark.parametrize(
    ("number", "before"),
    [(signal.SIGTERM, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)],
)
def test_a_command_ends_in_order_at_sigterm_and_when_its_terminal_closes(
    number: signal.Signals, before: signal.Handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of a container ignores what it does not handle; elsewhere what was half written would stay."""

    def stopped(**_: object) -> None:
        with replaced_file(tmp_path / "answers") as partial:
            assert partial.exists()
            os.kill(os.getpid(), number)
            time.sleep(60)

    monkeypatch.setattr(cli, "app", stopped)
    with _handled(number, before), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 128 + number
    assert not list(tmp_path.iterdir())


def test_a_command_under_nohup_goes_on_when_its_terminal_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: os.kill(os.getpid(), signal.SIGHUP))
    with _handled(signal.SIGHUP, signal.SIG_IGN), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


@contextmanager
def _handled(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    """Handle a signal as the system would before the command begins, and as this process did afterwards."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(number, handler)
    try:
        yield
    finally:
        for each, handling in before.items():
            signal.signal(each, handling)


def test_the_command_that_tune_prints_can_be_pasted_into_a_shell() -> None:
    best: dict[str, Any] = {"fit.epochs": 5, "params": {"a b": "it's"}}
    files = ("best.toml", "trials.log")
    report = TuneReport("run", "network", 3, 1, 3, None, 0.5, best, [], *files, 1.0)
    _, lines = of_tune(report, [Path("my cell")], ["--set", "estimator='network'"], Path("best of all.toml"))
    assert shlex.split(lines[-2])[1:] == [
        "reclaim", "train", "my cell", "--set", "estimator='network'", "--set", "fit.epochs=5",
        "--set", 'params={"a b": "it\'s"}',
    ]  # fmt: skip
    assert shlex.split(lines[-1])[1:] == ["reclaim", "train", "my cell", "--config", "best of all.toml"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_has_no_arrow_gets_a_question_mark(encoding: str) -> None:
    code = "from reclaim.cli.app import main; main()"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, env=environment, check=True)
    assert "ingest ? features" in done.stdout.decode(encoding)
