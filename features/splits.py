"""Who may learn from what: periods by time, groups by collection, and the gap of one horizon between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows

TRAIN, VALID, TEST = range(3)
PERIODS: Final = ("train", "valid", "test")
"""By the time t of the row."""

SEEN, VALID_UNSEEN, TEST_UNSEEN, IN_ALLOC = range(4)
GROUPS: Final = ("seen", "valid-unseen", "test-unseen", "in-alloc")
"""By collection: ``seen`` is trained on; ``valid-unseen`` only sets margins; ``test-unseen`` only tests. A task inside
an alloc instance lives off its alloc's resources, not the machine's: it is neither trained on nor scored, the alloc
instance is (as in the EuroSys'21 study, which takes top-level instances)."""


@dataclass(frozen=True)
class SplitConfig:
    """Where the periods end, and how many collections are held out."""

    train_share: float = 0.55
    """Share of the trace's time that is trained on."""
    valid_share: float = 0.20
    """Share of the time after it on which margins are set and training is stopped."""
    valid_unseen_share: float = 0.10
    """Share of the collections that are first seen when margins are set."""
    test_unseen_share: float = 0.20
    """Share of the collections that are first seen in the test."""

    def __post_init__(self) -> None:
        for name in ("train_share", "valid_share", "valid_unseen_share", "test_unseen_share"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.train_share + self.valid_share >= 1:
            raise ConfigError(
                f"train_share + valid_share must leave time to test, got {self.train_share} + {self.valid_share}"
            )
        if self.valid_unseen_share + self.test_unseen_share >= 1:
            raise ConfigError("valid_unseen_share + test_unseen_share must leave collections to train on")


def cuts_us(first_us: int, last_us: int, config: SplitConfig) -> tuple[int, int]:
    """Return the ends of the training and of the validation period, in µs on the trace's clock."""
    span = last_us - first_us
    train = first_us + int(span * config.train_share)
    return train, train + int(span * config.valid_share)


def periods(end_us: NDArray[np.int64], cuts: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the period of each row by its time t; uint8, shape (n,)."""
    return np.searchsorted(np.array(cuts), end_us, side="right").astype(np.uint8)


def groups(windows: Windows, config: SplitConfig) -> NDArray[np.uint8]:
    """Return the group of each row; uint8, shape (n,). A collection's group depends on its id alone."""
    share = _uniform(windows.collection_id)
    group = np.full(len(windows), SEEN, np.uint8)
    group[share < config.valid_unseen_share + config.test_unseen_share] = VALID_UNSEEN
    group[share < config.test_unseen_share] = TEST_UNSEEN
    group[windows.in_alloc] = IN_ALLOC
    return group


def _uniform(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each id, the same on every machine (the finaliser of SplitMix64)."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53
