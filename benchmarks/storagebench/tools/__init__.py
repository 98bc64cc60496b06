"""The tools: one file each, all implementing ``base.Tool``."""
