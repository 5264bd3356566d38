"""The resamples that settings ask for."""

from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.settings import ComparisonConfig


def test_the_settings_give_number_seed_and_confidence_of_the_resamples_each_in_its_place() -> None:
    of = Bootstrap.of(ComparisonConfig(draws=40, seed=3, confidence=0.8))
    assert of == Bootstrap(draws=40, seed=3, confidence=0.8)
