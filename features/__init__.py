"""What a model may look at: everything computed from the past of one task."""
