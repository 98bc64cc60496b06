"""Changes to libraries of others, while they are imported or later, that can be taken back."""
