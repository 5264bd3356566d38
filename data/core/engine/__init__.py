"""The engine of every stage: runs a pure function over jobs in threads, in processes or on a Ray cluster."""
