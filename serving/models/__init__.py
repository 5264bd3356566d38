"""Served models: loading, canary, cache and following of aliases; imports ``training``."""
