"""Monitoring: quality, drift and Prometheus metrics; imports ``serving.cell``."""
