"""The frontier experiment: reclaimed against violations, on tasks and on machines."""
