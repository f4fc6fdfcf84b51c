"""Floor 1."""
