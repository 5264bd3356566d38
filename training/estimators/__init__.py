"""Estimators that need no model: windows in, a reservation per task and resource out; imports ``features``."""
