"""Predictions as tables and files: of a dataset, and of histories in memory; imports answers, models and below."""
