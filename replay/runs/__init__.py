"""Runs of experiments: run, record, compare; imports every experiment by name."""
