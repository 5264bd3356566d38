"""Storage: a log and snapshots that survive a kill at any moment; imports ``data.core``."""
