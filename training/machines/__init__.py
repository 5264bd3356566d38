"""Reserves for a machine what its tasks need together."""
