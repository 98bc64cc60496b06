"""Tensors on GPUs: on a real one where there is one, elsewhere on a stand-in for the driver."""
