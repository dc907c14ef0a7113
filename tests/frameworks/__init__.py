"""Tests of the real frameworks, in real processes."""
