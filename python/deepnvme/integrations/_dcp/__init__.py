"""The parts of ``deepnvme.integrations.dcp``."""
