"""The ground floor: what a trace is, and how it gets here."""
