"""Features, targets and splits: everything computed from the past of tasks; imports ``data``."""
