"""Feed of a service from a Prometheus, slot by slot, with its reservations by name; imports client, wire and data."""
