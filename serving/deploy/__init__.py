"""Deployment: the bento, the dashboard and the alerts."""
