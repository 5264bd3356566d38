"""Tracking: MLflow runs, registered models and aliases; imports ``data`` alone."""
