"""Scripts that measure."""
