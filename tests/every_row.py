"""Features and labels of every row of a dataset, kept or not, for tests that compare with the whole."""

import numpy as np
from numpy.typing import NDArray

from reclaim.features.bucket import Labels
from reclaim.features.feature_set import FeatureSet


def labels_of(features: FeatureSet) -> Labels:
    """Return the labels of every row, in the order of the dataset."""
    parts = [features.bucket(number).labels for number in range(features.dataset.n_buckets)]
    return Labels(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def x_of(features: FeatureSet) -> NDArray[np.float32]:
    """Return the features of every row, in the order of the dataset."""
    buckets = [features.bucket(number) for number in range(features.dataset.n_buckets)]
    return np.concatenate([bucket.features(np.arange(len(bucket.windows))) for bucket in buckets])
