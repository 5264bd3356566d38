"""The fetch job: downloads shards of public traces; imports ``data.core``."""
