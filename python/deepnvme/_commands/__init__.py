"""The commands of the command line as functions: the same work, and the same fields as its ``--json``."""
