"""The closed loop: a simulated cell runs a workload under the reservations of an estimator; imports ``open_loop``."""
