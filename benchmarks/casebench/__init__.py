"""Loads, saves and single tensors of every kind, beside fio and the loaders that people use."""
