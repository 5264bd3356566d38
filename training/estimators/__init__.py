"""Estimators: what is known up to now in, a reservation per task and resource out."""
