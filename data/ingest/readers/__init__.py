"""Readers of raw files: CSV, parquet and JSON lines into staged rows; imports ``data.traces`` and ``data.core``."""
