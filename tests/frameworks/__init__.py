"""The frameworks themselves, in real processes."""
