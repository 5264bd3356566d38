"""Fetches raw samples from a Prometheus, or what speaks like one, over HTTP; imports ``data.traces`` for the layout."""
