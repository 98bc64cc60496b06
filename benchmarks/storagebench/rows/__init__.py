"""What is compared: one file for each kind of work, all behind ``base.Row``."""
