"""Measures how prices that follow keep their budgets, and what that costs, on validation rows alone.

    python -m benchmarks.choices.following DATASET ... --enough 640 1

Features are built with a long validation period, such as ``--set split.train_share=0.25 --set split.valid_share=0.5``.
One network per dataset is fitted to its training rows; prices are set on the first part of the validation rows and
followed over the rest (`training/margins/online.py`), at each number of violations a day that are enough for the full
rate. Printed are the violation as a multiple of the budget, of each week, too, what is reclaimed, and in brackets how
many points of the limits that is more than at one price of hindsight that violates as much. No row of a test period is
read.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.choices.tails import validation
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop.fold import answer_folded
from reclaim.training.fitting.network import NetworkLearner
from reclaim.training.fitting.sources import open_sources
from reclaim.training.margins import online
from reclaim.training.margins.answers import Answers, Setting
from reclaim.training.margins.calibrate import calibrate, guarded_reservations, reclaimed_share, violation_share
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.settings import NO_PRIOR, TrainConfig

HORIZON_S: Final = 3_600
MARGINS: Final = ("aggressive", "baseline")
MOVES: Final = np.arange(-4.0, 5.01, 0.25)
"""Logarithms by which the prices that were set are moved to find the one of hindsight; straight between two of them."""
_WEEK_US: Final = 7 * 86_400_000_000

Floats = NDArray[np.float64]


def main() -> None:
    """Fit and measure the datasets named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET")
    parser.add_argument("--enough", nargs="+", type=float, default=[online.ENOUGH], metavar="N")
    parser.add_argument(
        "--set-on", type=float, default=0.15, help="Part of the validation time that prices are set on."
    )
    parser.add_argument("--rows", type=int, default=120_000, help="Training rows, by default 120000.")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print("| dataset | way | " + " | ".join(f"{r}, {b}" for b in ("1 %", "0.1 %") for r in RESOURCES) + " |")
    print("|---|---|" + "---|" * (2 * len(RESOURCES)), flush=True)
    for path in given.datasets:
        for way, cells in measured(path, given.rows, given.set_on, given.enough):
            print(f"| {path.name} | {way} | {' | '.join(cells)} |", flush=True)


def measured(path: Path, n_rows: int, set_on: float, enough: list[float]) -> Iterator[tuple[str, list[str]]]:
    """Yield the cells of each way: prices as they were set, then those that follow."""
    (source,) = open_sources([path])
    config = TrainConfig(prior=NO_PRIOR)
    config = replace(config, fit=replace(config.fit, max_samples=n_rows))
    with tempfile.TemporaryDirectory() as folder:
        network = NetworkLearner().fit([source], config, Path(folder)).forecaster
    x, windows, target = validation(source.features, HORIZONS_S.index(HORIZON_S))
    answers = answer_folded(ForecastEstimator(network, HORIZON_S, mean_limit=source.features.mean_limit), x, windows)
    cut_us = int(np.quantile(windows.end_us, set_on))
    before = np.flatnonzero(windows.end_us <= cut_us - HORIZON_S * 1_000_000)
    rest = np.flatnonzero(windows.end_us > cut_us)
    settings = calibrate(answers.take(before), windows.take(before), target[before], Budgets()).settings
    answers, windows, target = answers.take(rest), windows.take(rest), target[rest]
    one_price = _of_one_price(answers, windows, target, settings)
    yield "as set", _cells(guarded_reservations(answers, windows, settings), windows, target, one_price)
    for of in enough:
        online.ENOUGH = of  # type: ignore[misc]
        held = online.OnlineMargins(settings, Budgets(), HORIZON_S).hold(windows.task_numbers(), answers, windows)
        yield f"following, {of:g}", _cells(held, windows, target, one_price)


def _of_one_price(
    answers: Answers, windows: Windows, target: Floats, settings: Mapping[str, Setting]
) -> Mapping[str, Floats]:
    """Return violation and reclaimed share at prices moved by ``MOVES``; of each margin (n_moves, 2, n_resources)."""
    found: dict[str, list[Floats]] = {margin: [] for margin in MARGINS}
    for move in MOVES.tolist():
        prices = [settings[name] for name in ("baseline", "aggressive")]
        both = [
            price.moved(np.full((len(price.of_tiers), len(RESOURCES)), move))
            for price in prices
            if isinstance(price, Price)
        ]
        for margin, reserved in guarded_reservations(answers, windows, three_prices(*both)).items():
            if margin in found:
                found[margin].append(_shares(reserved, windows, target))
    return {margin: np.array(of) for margin, of in found.items()}


def _shares(reserved: Floats, windows: Windows, target: Floats) -> Floats:
    """Return the violation and the reclaimed share; shape (2, n_resources)."""
    judged = np.where(np.isfinite(target), windows.limit, np.nan)
    return np.stack([violation_share(reserved, windows.limit, target), reclaimed_share(reserved, judged)])


def _cells(held: Mapping[str, Floats], windows: Windows, target: Floats, one_price: Mapping[str, Floats]) -> list[str]:
    """Return a cell for each budget and resource."""
    week = (windows.end_us - windows.end_us.min()) // _WEEK_US
    cells = []
    for margin in MARGINS:
        budget = Budgets().of(margin)
        assert budget is not None
        violated, reclaimed = _shares(held[margin], windows, target)
        weeks = [
            _shares(held[margin][week == k], windows.take(week == k), target[week == k])[0] for k in np.unique(week)
        ]
        for r in range(len(RESOURCES)):
            if not np.isfinite(reclaimed[r]):
                cells.append("-")
                continue
            at, of = np.maximum(one_price[margin][::-1, :, r], 1e-9).T
            more = reclaimed[r] - np.interp(np.log(max(violated[r], 1e-9)), np.log(at), of)
            by_week = ", ".join(f"{w[r] / budget:.2f}" for w in weeks)
            cells.append(f"{violated[r] / budget:.2f} ({by_week}): {100 * reclaimed[r]:.1f} ({100 * more:+.1f})")
    return cells


if __name__ == "__main__":
    main()
