"""Results of the pages, each made by one command: forecasts, machines, cells replayed, out-of-memory risk, drift."""
