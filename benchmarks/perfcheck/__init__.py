"""A regression check: short cases, each beside a baseline, compared with recorded ratios."""
