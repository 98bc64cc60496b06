"""Filling a model from the safetensors files that it was downloaded as, the way a model server does."""
