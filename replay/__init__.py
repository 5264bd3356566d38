"""The proving ground: what would have happened under another estimator or margin."""
