"""Results of the commands: for each, the facts that ``--json`` prints and the lines for a person."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any, Final

from reclaim.cli.console import unchanged

if TYPE_CHECKING:
    from reclaim.data.fetch.job import FetchReport
    from reclaim.data.fetch.prometheus.job import HistoryReport
    from reclaim.data.ingest.job import IngestReport
    from reclaim.data.synthetic.job import SyntheticCellReport
    from reclaim.data.synthetic.kubernetes.job import SyntheticHistoryReport
    from reclaim.features.feature_set import FeatureSet
    from reclaim.replay.machine_peaks.job import PeaksReport
    from reclaim.replay.runs.promote import Promotion
    from reclaim.serving.feed.job import FeedReport
    from reclaim.serving.predictions.job import PredictReport
    from reclaim.training.fitting.train import TrainReport
    from reclaim.training.fitting.tune import TuneReport
    from reclaim.training.tracking.references import ModelLocation

Result = tuple[dict[str, Any], list[str]]
_LISTING: Final = "kube_pod_info"
"""Metric that kube-state-metrics has of every pod."""


def of_synth(report: SyntheticCellReport) -> Result:
    """Return the result of ``reclaim synth``."""
    facts = {"cell": str(report.out), "rows": report.rows, "tasks": report.tasks, "ends": report.ends,
             "wrote": report.wrote}  # fmt: skip
    windows = report.rows["instance_usage"]
    return facts, [
        f"{report.out}: {windows:,} usage windows of {report.tasks:,} tasks{unchanged(not report.wrote)}",
    ]


def of_fetch(report: FetchReport, out: Path) -> Result:
    """Return the result of ``reclaim fetch``."""
    return {"folder": str(out), **asdict(report)}, [
        f"{out}: {len(report.files)} files, {len(report.fetched)} of them new ({report.n_bytes:,} bytes); "
        f"{len(report.unchecked)} without a published checksum{unchanged(not report.fetched)}",
    ]


def of_synthetic_history(report: SyntheticHistoryReport) -> Result:
    """Return the result of ``reclaim synth --format openmetrics``."""
    return {**asdict(report), "out": str(report.out)}, [
        f"{report.out}: {report.samples:,} samples of {report.series:,} series, {report.containers:,} containers of "
        f"{report.pods:,} pods; {report.ends['OOMKilled']} out-of-memory kills{unchanged(not report.wrote)}",
        "make blocks of each day: promtool tsdb create-blocks-from openmetrics DAY.om DATA",
    ]


def of_history(report: HistoryReport, out: Path) -> Result:
    """Return the result of ``reclaim fetch prometheus``."""
    found = report.plan.found if report.plan is not None else ()
    listed = {one.metric.name: {"series": one.series, "samples": one.samples} for one in found}
    facts = {"folder": str(out), **{k: v for k, v in asdict(report).items() if k != "plan"}, "found": listed}
    start, end = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" for at in (report.start_s, report.end_s))
    if report.plan is not None and not report.fetched:
        plan = report.plan
        facts |= {"transport": plan.transport, "server": plan.server, "bytes": plan.n_bytes, "seconds": plan.seconds}
        lines = [f"{start} to {end} UTC, by {plan.transport}, server {plan.server}"]
        lines += [f"  {one.metric.name}: {one.series:,} series, about {one.samples:,} samples" for one in found]
        lines += [f"  {name}: none" for name in report.missing]
        lines += _of_namespace(report)
        lines.append(
            f"about {plan.samples:,} samples in {plan.pieces} pieces, {plan.n_bytes / 1e6:,.0f} MB, "
            f"{plan.seconds / 60:,.1f} minutes; nothing was fetched"
        )
        return facts, lines
    lines = [
        f"{out}: {start} to {end} UTC in {report.pieces} pieces, {report.fetched} of them new ({report.samples:,} "
        f"samples, {report.n_bytes / 1e6:,.1f} MB){unchanged(not report.fetched)}"
    ]
    lines += _of_empty(report)
    if report.missing:
        lines.append(f"the server has no {', '.join(report.missing)}")
    return facts, lines + _of_namespace(report)


def _of_namespace(report: HistoryReport) -> list[str]:
    """Return why metrics of kube-state-metrics may be missing, where namespaces were asked for."""
    if report.namespace is None or _LISTING not in report.missing:
        return []
    return [
        f"no {_LISTING} with these namespaces: without honor_labels, the label is the namespace of kube-state-metrics "
        "itself; leave --namespace out"
    ]


def _of_empty(report: HistoryReport) -> list[str]:
    """Return where a history has no usage: at its beginning, as a server keeps samples for some days, and within."""
    if not report.empty_s:
        return []
    length_s = (report.end_s - report.start_s) // report.pieces
    first_s = report.start_s
    while first_s in report.empty_s:
        first_s += length_s
    lines = []
    if first_s > report.start_s:
        days = (report.end_s - first_s) / 86_400
        lines.append(
            f"no usage before {datetime.fromtimestamp(first_s, UTC):%Y-%m-%d %H:%M} UTC: {days:.4g} of "
            f"{(report.end_s - report.start_s) / 86_400:.4g} days are there; the server may keep no more"
        )
    if within := [at for at in report.empty_s if at > first_s]:
        at = datetime.fromtimestamp(within[0], UTC)
        after = " after that" if lines else ""
        lines.append(f"no usage in {len(within)} of the pieces{after}, the first of {at:%Y-%m-%d %H:%M} UTC")
    return lines


def of_ingest(report: IngestReport, dataset: Path) -> Result:
    """Return the result of ``reclaim ingest``."""
    from reclaim.data.ingest.manifest import notes_of

    manifest = report.dataset.manifest
    counts, rejected, damaged = manifest["counts"], sum(manifest["rejects"].values()), len(manifest["damaged"])
    keys = ("fingerprint", "nature", "counts", "rejects", "damaged", "defects", "warnings", "lacks", "notes")
    lines = [
        f"{dataset}: {counts['usage']:,} windows of {counts['tasks']:,} tasks, {manifest['nature']}; "
        f"{rejected:,} line{'s' * (rejected != 1)} rejected, {damaged} file{'s' * (damaged != 1)} damaged"
        f"{unchanged(report.already_there)}"
    ]
    lines += notes_of(manifest, report.findings)
    facts = {"dataset": str(dataset), "already_there": report.already_there}
    return facts | {key: manifest.get(key, []) for key in keys}, lines


def of_features(built: FeatureSet, already_there: bool) -> Result:
    """Return the result of ``reclaim features``."""
    keys = ("fingerprint", "pipeline", "rows", "targets", "oom_events", "oom_definition")
    folder = built.dataset.path / built.path.name
    facts = {"features": str(folder), "already_there": already_there, "role": built.role}
    from reclaim.data.oom import OOM_RECORDED
    from reclaim.data.schema import RESOURCES

    label = "recorded or derived" if built.manifest["oom_definition"] == OOM_RECORDED else "derived"
    lines = [
        f"{folder}: {len(built):,} of {built.bucket_start[-1]:,} rows kept, with {built.x.shape[1]} features each; "
        f"{len(built.train_rows()):,} for training, "
        f"{len(built.valid_rows()):,} for margins, {len(built.test_rows()):,} for tests; "
        f"{built.manifest['oom_events']} OOM events by the {label} label{unchanged(already_there)}"
    ]
    known = built.manifest["targets"]["valid"]
    unknown = [h for h in known[RESOURCES[0]] if not any(known[r][h]["known"] for r in RESOURCES)]
    empty = built.empty_periods()
    if unknown and "valid" not in empty:
        if not len(built.valid_rows()):
            remedy = "collections kept for the test have them all; --set split.test_unseen_share=0.01 keeps fewer"
        elif len(unknown) < len(known[RESOURCES[0]]):
            remedy = "a longer history has some"
        else:
            remedy = "a row needs a limit, and a later window of its task"
        lines.append(
            f"no row for margins has a known demand over {' or '.join(unknown)}: at these horizons no margin or price "
            f"can be set; {remedy}"
        )
    if empty:
        words = {"train": "training", "valid": "validation", "test": "test"}
        rows = " and ".join(f"{n:,} in the {words[name]} period" for name, n in empty.items())
        first, last = (str(of.astype("M8[m]")).replace("T", " ") for of in built.span)
        tasks = built.outermost()
        lines.append(
            f"{rows}, of {built.bucket_start[-1]:,} windows, as periods divide the time from {first} to {last} UTC: "
            f"where the trace is shorter, a row has a wrong time; correct it and ingest again (the first window is of "
            f"task {tasks[0]}, the last of {tasks[1]})"
        )
    if built.role == "test":
        lines.append("held out (split.role=test): for models trained on other datasets")
    return facts | {key: built.manifest[key] for key in keys}, lines


def of_train(report: TrainReport, folders: list[Path], promotion: Promotion | None) -> Result:
    """Return the result of ``reclaim train`` on datasets in folders, and of the promotion after it."""
    datasets = " ".join(map(str, folders))
    lines = [
        f"{report.model}/{report.version}: {report.estimator} of {report.rows['train']:,} rows "
        f"in {report.seconds:.0f} s, run {report.run_id}{unchanged(report.reused)}"
    ]
    if len(report.datasets) > 1:
        lines += [f"{d['name']}: {d['train']:,} rows for training, {d['valid']:,} for prices" for d in report.datasets]
    served = f"{report.model}/{report.champion} is champion" if report.champion else "there is no champion"
    if report.champion != report.version:
        served += f"; `reclaim promote {datasets} --model {report.model}/{report.version}` serves this one if not worse"
    if promotion is None:
        return asdict(report), [*lines, *report.notes, served]
    facts, of_promotion_ = of_promotion(promotion)
    return asdict(report) | {"promotion": facts}, [*lines, *report.notes, *of_promotion_]


def of_promotion(promotion: Promotion) -> Result:
    """Return the result of ``reclaim promote``; the reason of a refusal is an error, printed apart."""
    name = f"{promotion.model}/{promotion.version}"
    line = f"{name} is champion: {promotion.why}"
    return {**asdict(promotion), "refused": promotion.refused}, [] if promotion.refused else [line]


def of_bundle(location: ModelLocation, out: Path) -> Result:
    """Return the result of ``reclaim bundle``."""
    facts = {"folder": str(out), "model": location.name, "version": location.version, "run_id": location.run_id}
    return facts, [f"{out}: {location.label}; `reclaim serve --model {out}` serves it"]


def of_tune(report: TuneReport, datasets: list[Path], given: list[str], out: Path) -> Result:
    """Return the result of ``reclaim tune``, with the commands that train with the best settings."""
    command = ["reclaim", "train", *map(str, datasets)]
    as_given = "" if report.first_loss is None else f"; {report.first_loss:.5f} with the settings as given"
    return {**asdict(report), "assignments": join(report.assignments())}, [
        f"{report.estimator}: validation loss {report.best_loss:.5f}{as_given}; {report.trials} trials, "
        f"{report.new} of them new, {report.pruned} stopped early or diverged; run {report.run_id}, "
        f"{report.seconds:.0f} s",
        *(f"reclaims less of validation rows than with the settings as given, {less}" for less in report.less),
        f"train   {join([*command, *given, *report.assignments()])}",
        f"or      {join([*command, '--config', str(out)])}",
    ]


def of_predict(report: PredictReport, out: Path) -> Result:
    """Return the result of ``reclaim predict``."""
    return {"predictions": str(out), **asdict(report)}, [
        f"{out}: {report.rows:,} rows of {report.tasks:,} tasks, by {report.model}/{report.version} under the "
        f"{report.margin} margin, {report.horizon_s:,} s ahead",
        *report.notes,
    ]


def of_feed(report: FeedReport, history: Path) -> Result:
    """Return the result of ``reclaim feed --once``."""
    until = datetime.fromtimestamp(report.until_us / 1e6, UTC)
    refused = "".join(f", {n:,} refused as {code}" for code, n in sorted(report.refused.items()))
    return {"history": str(history), **asdict(report)}, [
        f"{history}: {report.windows:,} windows of {report.slots:,} slots sent, until {until:%Y-%m-%d %H:%M} UTC; "
        f"{report.ended:,} tasks ended{refused}",
    ]


def of_peaks(report: PeaksReport, out: Path) -> Result:
    """Return the result of ``reclaim peaks``."""
    return {"peaks": str(out), **asdict(report)}, [
        f"{out}: {report.predictions:,} predictions of {len(report.predictors)} predictors for {report.machines:,} "
        f"machines, from {report.samples:,} samples in {report.seconds:.1f} s",
    ]
