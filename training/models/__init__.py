"""Learned models: the network, the trees and the estimator made of them; imports ``training.margins``."""
