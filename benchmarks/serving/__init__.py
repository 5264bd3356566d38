"""Service under load, attacks, kills and growing cells, and what a Prometheus costs."""
