"""A synthetic Kubernetes history as Prometheus would have scraped it, with its truth; imports ``data.core``."""
