"""Helpers that several packages need."""
