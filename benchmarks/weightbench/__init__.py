"""Filling a model from its safetensors files, as a model server does."""
