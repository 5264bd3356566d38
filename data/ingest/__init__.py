"""The ingest job: raw trace files in, a dataset out; imports ``data.traces`` and its own readers."""
