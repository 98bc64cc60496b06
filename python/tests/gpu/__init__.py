"""Tensors on GPUs: on a real one if there is one, otherwise on a fake driver."""
