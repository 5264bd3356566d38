"""The synthetic cell: a seeded trace in the Google v3 layout for the demo and the tests; imports ``data.core``."""
