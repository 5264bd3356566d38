"""Comparisons on validation rows, by which settings and features are chosen."""
