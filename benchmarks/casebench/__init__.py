"""Loads, saves and single tensors of every kind, compared with fio and the loaders that people use."""
