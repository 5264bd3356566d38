"""The survey of a dataset: facts, figures and a page; imports ``data.dataset`` and ``data.core``."""
