"""Machine peaks: predictors of what all tasks of a machine use at once; imports ``data``."""
