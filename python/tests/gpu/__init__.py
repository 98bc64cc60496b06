"""Tensors on GPUs: on a real one where there is one, and always on a stand-in for the driver."""
