"""The model card: says what a reader must know, from plain facts, in the room that MLflow has."""

from typing import Any

from reclaim.data.oom import OOM_DEFINITION
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.evaluation.model_card import LONGEST, model_card
from reclaim.training.models.oom_calibration import ProbabilityCalibration
from reclaim.training.settings import TrainConfig


def report(**changed: Any) -> dict[str, Any]:
    of_target = {"rows": 12_345.0, "pinball_over_usage": 0.0421, "coverage_error": 0.003, "width": 0.31}
    of_oom = {"positives": 31.0, "base_rate": 0.0009, "brier_skill": 0.05, "ece": 0.0002, "recall_at_10": 0.5}
    both = {"cpu": 0.01, "memory": None}
    horizons = [f"{h}s" for h in HORIZONS_S]
    names = ("baseline", "medium", "aggressive")
    facts: dict[str, Any] = {
        "run_id": "0123456789abcdef", "model": "reclaim", "version": "7", "estimator": "network", "horizon_s": 3_600,
        "prices": {m: {"value": {"cpu": 31.25, "memory": 0.5}, "by_tier": None} for m in names},
        "violation": dict.fromkeys(names, both), "reclaimed": {m: {"cpu": 0.75, "memory": 0.5} for m in names},
        "scores": {t: dict.fromkeys(horizons, of_target) for t in TARGETS} | {"oom": dict.fromkeys(horizons, of_oom)},
        "rows": {"train": 1000, "valid": 100},
        "datasets": [{"name": "cell_a", "nature": "synthetic", "fingerprint": "f" * 64, "train": 1000, "valid": 100}],
        "notes": ["memory: no row has a limit", f"OOM label: {OOM_DEFINITION}"], "seconds": 1.0, "reused": False,
    }  # fmt: skip
    return facts | changed


def test_the_card_names_model_data_scores_and_how_to_load_it() -> None:
    calibration = ProbabilityCalibration((0.5, 1.0, 2.0), (0.1, 0.0, -0.25)).to_dict()
    test_scores = {"cpu": {"3600s": {"rows": 77.0, "pinball_over_usage": 0.0555}}}
    card = model_card(report(), settings=TrainConfig().settings(), test_scores=test_scores, probability=calibration)
    for text in (
        "# reclaim: network, 3600 s ahead", "| cell_a | synthetic | ffffffffffff | 1,000 | 100 |",
        "| medium | cpu | 31.2 | 1.00 % | 75.00 % |",
        "| baseline | memory | 0.5 | - | 50.00 % |", "0.0555",
        "| test ", "12345", "0.0009", OOM_DEFINITION, "86400s: slope 2, intercept -0.25",
        "compressible", "drift", "reclaim serve --model reclaim/7", "0123456789abcdef", "fit.width=128",
        "memory: no row has a limit",
    ):  # fmt: skip
        assert text in card, text
    assert card.count(OOM_DEFINITION) == 1
    assert len(card) <= LONGEST


def test_each_period_horizon_and_margin_has_a_line_of_its_own_numbers() -> None:
    valid = {"cpu": {f"{h}s": {"rows": float(h)} for h in HORIZONS_S}} | {
        "oom": {
            f"{h}s": {"positives": h / 100, "recall_at_10": h / 1e6, "recall_bound_at_10": 0.75} for h in HORIZONS_S
        }
    }
    test = {"cpu": {"3600s": {"rows": 77.0}}, "oom": {"300s": {"positives": 2.0, "average_precision": 0.125}}}
    shares = {m: {"cpu": k / 100, "memory": k / 10} for k, m in enumerate(("baseline", "medium", "aggressive"), 1)}
    card = model_card(report(scores=valid, violation=shares), settings={}, test_scores=test)
    lines = [line for line in card.splitlines() if line.startswith("| ")]
    assert [line for line in lines if line.startswith("| cpu")] == [
        "| cpu | 3600 s | validation | 3,600 | - | - | - | - |", "| cpu | 3600 s | test | 77 | - | - | - | - |",
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("| oom")] == [
        "| oom | 300 s | validation | 3 | - | - | - | - | 0.0003 | 0.75 | - | - |",
        "| oom | 300 s | test | 2 | - | - | - | 0.125 | - | - | - | - |",
        "| oom | 3600 s | validation | 36 | - | - | - | - | 0.0036 | 0.75 | - | - |",
        "| oom | 86400 s | validation | 864 | - | - | - | - | 0.0864 | 0.75 | - | - |",
    ]
    assert [line.split(" | ")[3] for line in lines if " | cpu | 31.2" in line] == ["1.00 %", "2.00 %", "3.00 %"]
    assert [line.split(" | ")[3] for line in lines if " | memory | 0.5" in line] == ["10.00 %", "20.00 %", "30.00 %"]


def test_without_test_scores_calibration_and_version_it_says_so() -> None:
    card = model_card(report(version="", scores={}), settings={})
    assert "| test" not in card
    assert "as the model says it" in card
    assert "reclaim serve --model reclaim@champion" in card
    assert "None" not in card


def test_a_second_fit_that_is_served_is_told_of() -> None:
    once, twice = (model_card(report(), settings={}, refitted=refitted) for refitted in (False, True))
    assert "Fitted on the training period" in once
    assert "once more" not in once
    assert "fitted once more, to both: the second fit is served" in twice
    assert twice.endswith(once[-200:])


def test_many_settings_are_cut_before_anything_else_and_many_datasets_still_fit() -> None:
    card = model_card(report(), settings={f"name_{k}": "x" * 50 for k in range(200)})
    assert len(card) == LONGEST  # as many of them as there is room for
    assert f" name_0={'x' * 50}, name_1=" in card
    assert "all of them are the run's parameters" in card
    assert "memory: no row has a limit" in card
    many = [report()["datasets"][0] | {"name": f"cell_{k}"} for k in range(200)]
    assert len(model_card(report(datasets=many), settings={})) <= LONGEST


def test_the_same_facts_give_the_same_card() -> None:
    assert model_card(report(), settings={"a": 1}) == model_card(report(), settings={"a": 1})
