"""Runs replays from Python, with results as frames and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from reclaim.api.display import Figure, frame_of_results, html_of_results
from reclaim.config import config_from
from reclaim.data.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from reclaim.replay.experiment import Experiment, Results
    from reclaim.replay.report.page import ReplayReport
    from reclaim.training.bundle import Bundle


R = TypeVar("R", bound="Replay")


@runtime_checkable
class Learned(Protocol):
    """A ``Model``; a replay needs only its bundle."""

    @property
    def bundle(self) -> Bundle:
        """Everything registered with it."""


def run(
    answer: type[R], experiment: str, dataset: Path, out: Path | str, *, models: Sequence[Learned],
    settings: Mapping[str, Any] | None, tracking: bool = True,
) -> R:  # fmt: skip
    """Run an experiment; arguments and errors as for ``Dataset.replay`` and ``Dataset.recommend``."""
    from reclaim.data.core.stores.places import on_this_machine
    from reclaim.replay.runs.catalogue import load_experiment
    from reclaim.replay.runs.run import run_experiment

    loaded = load_experiment(experiment)
    config = config_from(loaded.config, settings or {})
    return answer(
        loaded,
        run_experiment(loaded, dataset, on_this_machine(out), config, bundles=_bundles(models), tracking=tracking),
    )


def _bundles(models: Sequence[Learned]) -> dict[str, Bundle]:
    """Return the bundles of models by name; ConfigError where something other than a model is given, such as a name."""
    from reclaim.replay.runs.run import by_name

    if not isinstance(models, Sequence) or not all(isinstance(model, Learned) for model in models):
        raise ConfigError(f"models must be a list of what reclaim.load or reclaim.train returns, got {models!r}")
    return by_name([model.bundle for model in models])


class Replay:
    """A finished replay; a notebook shows its summary and its figures.

    Parameters
    ----------
    experiment : replay.experiment.Experiment
    report : replay.report.page.ReplayReport
    """

    def __init__(self, experiment: Experiment, report: ReplayReport) -> None:
        self._experiment = experiment
        self._report = report

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._experiment.name!r}, {self._report.folder.name!r})"

    def _repr_html_(self) -> str:
        figures = "".join(f"<div>{figure._repr_svg_()}</div>" for figure in self.figures.values())
        return html_of_results(self._experiment.summary(self.results)) + figures

    @property
    def page(self) -> Path:
        """HTML page with all tables, figures and definitions."""
        return self._report.page

    @property
    def results(self) -> Results:
        """All of ``results.json``."""
        return self._report.results

    @property
    def summary(self) -> pd.DataFrame:
        """The table of the command line, shares as fractions of one."""
        return frame_of_results(self._experiment.summary(self.results))

    @property
    def runs(self) -> pd.DataFrame:
        """One row per estimator and margin, with every number that ``reclaim compare`` shows."""
        from reclaim.replay.report.page import runs_table

        return frame_of_results(runs_table(self._experiment.runs(self.results), self._experiment.columns))

    @property
    def figures(self) -> Mapping[str, Figure]:
        """The figures of the page by name, each shown inline by a notebook."""
        drawn = {name: self._report.folder / f"{name}.svg" for name in self._experiment.figures}
        return {name: Figure(path) for name, path in drawn.items() if path.is_file()}


class Recommendations(Replay):
    """Requests for every workload, with the back-test of each; a notebook shows their summary."""

    @property
    def workloads(self) -> pd.DataFrame:
        """One row per workload: the columns of ``recommendations.csv``."""
        import pandas as pd

        from reclaim.replay.experiments.recommend.formats import records

        return pd.DataFrame(records(self.results))
