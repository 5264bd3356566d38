"""The causal fold: a record per task, updated by each window and read as features; imports ``features.registry``."""
