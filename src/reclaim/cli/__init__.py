"""The command line: verbs that parse, call one function of a room and print; imports every room."""
