"""Time and memory of the stages, next to other tools or to an earlier commit."""
