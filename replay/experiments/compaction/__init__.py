"""The compaction experiment (EuroSys'15, Figure 10): the fewest machines that hold a workload."""
