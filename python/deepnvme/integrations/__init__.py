"""deepnvme inside the checkpointing of others. Each module is imported by itself, and needs what it is for."""
