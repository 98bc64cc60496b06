"""A guard against sliding back: short cases beside a baseline each, compared with the ratios on record."""
