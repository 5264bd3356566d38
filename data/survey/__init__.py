"""The survey of a dataset: facts, figures and a page; imports ``data.dataset``, ``data.oom`` and ``data.core``."""
