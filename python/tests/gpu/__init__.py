"""Tensors on GPUs: on a real one where there is one, elsewhere on a fake driver."""
