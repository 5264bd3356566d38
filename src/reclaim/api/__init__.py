"""Python interface for notebooks: the stages of the command line with pandas in and out; imports all rooms."""
