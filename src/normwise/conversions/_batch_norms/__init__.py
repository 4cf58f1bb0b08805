"""Batch norms with running statistics, and the layers beside them that take them over."""
