"""Several processes that save and restore one checkpoint."""
