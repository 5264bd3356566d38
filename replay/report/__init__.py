"""Reports: figures, pages and unit sums of an experiment; imports ``replay.experiment``."""
