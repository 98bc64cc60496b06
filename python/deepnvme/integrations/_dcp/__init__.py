"""The reader and the index of ``deepnvme.integrations.dcp``."""
