"""The error of an operation that a tool does not support."""


class NotOffered(Exception):
    """This tool does not support the operation; the text has the reason."""
