"""Evaluation: scores, alerts, importance and the model card; imports ``training.models``."""
