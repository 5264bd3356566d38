"""The recommendation: one request for all tasks of each workload, judged on the weeks after it was set."""
