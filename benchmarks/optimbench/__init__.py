"""Optimizer steps in memory: the kernel beside torch's and DeepSpeed's."""
