"""Estimators at equal violation: each at every margin or price, compared at each budget; imports ``open_loop``."""
