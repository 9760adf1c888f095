"""Checks that need no torch."""
