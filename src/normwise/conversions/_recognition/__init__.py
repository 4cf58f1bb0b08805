"""Modules that are norms, recognised by what they compute, and the layers of ours that take their places."""
