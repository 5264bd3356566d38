"""The open loop: estimators answer a recorded history and are scored on it; imports ``training``."""
