"""Writing: the thread that changes task state, its queue, log and snapshots; imports ``cell`` and ``storage``."""
