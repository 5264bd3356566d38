"""Traces and datasets: formats, readers, ingest, survey and the synthetic cell; imports no other room."""
