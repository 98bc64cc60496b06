"""A regression check: short cases, whose ratios to a baseline are compared with recorded ones."""
