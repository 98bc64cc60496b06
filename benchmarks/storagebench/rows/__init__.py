"""The rows of the comparison: one file for each kind of work, all behind ``base.Row``."""
