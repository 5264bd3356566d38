"""reclaim: predict what every task in a cluster will need, so that the rest can be lent out."""

__version__ = "0.1.0"
