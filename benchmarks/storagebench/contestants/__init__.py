"""Who is compared: one file for each contestant, all behind ``base.Contestant``."""
