"""Small things that several packages need."""
