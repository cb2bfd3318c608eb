"""Helpers without a place of their own."""
