"""Trace formats: the tables, columns and units of each trace that ingest reads; imports ``data.core``."""
