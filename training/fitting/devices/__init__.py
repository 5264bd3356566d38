"""Fits on a GPU and in several processes: ranks that fit as one, steps recorded once; imports no part of fitting."""
