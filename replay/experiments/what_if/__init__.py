"""The what-if experiment: a workload on fewer or more machines under each estimator."""
