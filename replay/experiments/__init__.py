"""Experiments: one folder each, independent of each other; imports everything of ``replay`` but ``runs``."""
