"""Finds which features carry the network's forecast one hour ahead, by permutation, one at a time and in groups.

    python -m benchmarks.choices.importance DATASET [DATASET ...]

A network is fitted on training rows. Then, among validation rows, a feature's values are permuted, and the CRPS of its
curves rises by as much as the forecast rested on it: importance is the rise over the loss, the mean of the repeats. A
feature looks unimportant where others carry the same. So groups are permuted together, too.

Breiman, "Random Forests", Machine Learning 2001 (permutation importance).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from benchmarks import made_by
from reclaim.data.core.style import STYLE
from reclaim.data.dataset import Dataset
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.evaluation.importance import (
    Columns,
    Importance,
    columns_alone,
    columns_by_group,
    draw_bars,
    group_of,
    permutation_importance,
)
from reclaim.training.fitting.network import fit_network
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig

HORIZON_S = 3_600
CONFIG = FitConfig()
THREADS = 2
_H = HORIZONS_S.index(HORIZON_S)
_TOP = 10


def main() -> None:
    """Measure every dataset, and write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET")
    parser.add_argument("--rows", type=int, default=20_000, help="Validation rows that are dealt.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "importance.json")
    arguments = parser.parse_args()
    results = [_measure(path, arguments.rows, arguments.repeats, arguments.seed) for path in arguments.datasets]
    content = {
        **made_by(
            f"python -m benchmarks.choices.importance {' '.join(path.name for path in arguments.datasets)} "
            f"--rows {arguments.rows} --repeats {arguments.repeats} --seed {arguments.seed}"
        ),
        "horizon_s": HORIZON_S,
        "datasets": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)  # where there were no rows: JSON has no NaN
    arguments.out.write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")
    _draw(results, arguments.out.with_suffix(".svg"))
    print(f"wrote {arguments.out} and {arguments.out.with_suffix('.svg').name}")


def _measure(path: Path, n_rows: int, repeats: int, seed: int) -> dict[str, Any]:
    """Return and print everything about one dataset."""
    rng = np.random.default_rng(seed)
    features, _ = build_features(Dataset.open(path), FeatureConfig(rows="all"))
    groups = columns_by_group(FEATURE_NAMES)
    train, valid = _draw_rows(features.train_rows(), CONFIG.max_samples, rng), features.valid_rows()
    y = features.targets(valid)[0][:, :, _H]
    known = np.isfinite(y).any(axis=1)
    valid, y = valid[known], y[known]
    rows = Rows(features.x[train], *features.targets(train))
    chosen = _draw_rows(valid, CONFIG.max_valid_samples, rng)
    rows_of_valid = Rows(features.x[chosen], *features.targets(chosen))
    fitted = fit_network(rows, rows_of_valid, CONFIG, seed=seed)
    model = NetworkForecaster.of(fitted.network, fitted.heads)

    def dealt(columns: Columns) -> Importance:
        return permutation_importance(
            model, features.x[valid], features.targets(valid)[0], horizon_s=HORIZON_S, columns=columns,
            rows=n_rows, repeats=repeats, seed=seed, threads=THREADS,
        )  # fmt: skip

    single, together = dealt(columns_alone(FEATURE_NAMES)), dealt(groups)
    grouped = {name: {"features": len(groups[name]), **rises} for name, rises in together.to_dict().items()}
    result: dict[str, Any] = {
        "dataset": path.name,
        "train_rows": len(train),
        "valid_rows": len(valid),
        "dealt_rows": single.rows,
        "loss": _named(single.loss),
        "features": single.to_dict(),
        "top": {target: _top(single.to_dict(), target) for target in ("mean", *TARGETS)},
        "groups": grouped,
    }
    _print(result)
    return result


def _draw_rows(rows: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return np.sort(rng.choice(rows, min(n, len(rows)), replace=False))


def _named(values: NDArray[np.float64]) -> dict[str, float]:
    """Return a number for each target, and their mean."""
    pairs = zip((*TARGETS, "mean"), (*values, values.mean()), strict=True)
    return {name: round(float(value), 5) for name, value in pairs}


def _top(importances: dict[str, dict[str, float | None]], by: str) -> list[str]:
    return sorted(importances, key=lambda name: -(importances[name][by] or 0.0))[:_TOP]


def _print(result: dict[str, Any]) -> None:
    targets = (*TARGETS, "mean")
    print(
        f"\n{result['dataset']}: {result['train_rows']} training rows, {result['dealt_rows']} dealt; rise of the loss"
    )
    head = " ".join(f"{name:>9s}" for name in targets)
    print(f"{'feature':28s} {'group':18s} {head}")
    for name in result["top"]["mean"]:
        print(f"{name:28s} {group_of(name):18s}", " ".join(f"{result['features'][name][t]:9.2%}" for t in targets))
    for name, line in result["groups"].items():
        print(f"{name:28s} {line['features']:<18d}", " ".join(f"{line[t]:9.2%}" for t in targets))


def _bars(bars: dict[str, dict[str, float]], result: dict[str, Any]) -> Importance:
    rise = np.array([[bar[target] for target in TARGETS] for bar in bars.values()], np.float64)
    return Importance(tuple(bars), rise, np.array([result["loss"][target] for target in TARGETS]), result["dealt_rows"])


def _draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the ten features and the groups of each dataset: the bar is the mean, a mark each target."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(results), figsize=(4.6 * len(results), 5.6), squeeze=False, sharex=True, layout="constrained",
            gridspec_kw={"height_ratios": (_TOP, len(results[0]["groups"]))},
        )  # fmt: skip
        drawn = [
            [
                _bars(bars, result)
                for bars in ({k: result["features"][k] for k in result["top"]["mean"]}, result["groups"])
            ]
            for result in results
        ]
        widest = max(one.widest for pair in drawn for one in pair)
        for column, result in enumerate(results):
            for axis, one in zip(axes[:, column], drawn[column], strict=True):
                draw_bars(axis, one, widest)
            axes[0, column].set_title(result["dataset"])
        figure.supxlabel("rise of the CRPS when dealt to other rows; the bar is the mean", fontsize=9.5)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=len(TARGETS))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
