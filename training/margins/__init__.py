"""Margins: the violation rule, guards, calibration and plans; imports ``training.estimators``."""
