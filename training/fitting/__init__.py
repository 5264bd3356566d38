"""Fitting: samples, the training job and the search for settings; imports every other part of ``training``."""
