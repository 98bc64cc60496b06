"""Optimizer steps in memory: deepnvme's kernel, torch's and DeepSpeed's."""
