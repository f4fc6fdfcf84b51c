"""Floor 6."""
