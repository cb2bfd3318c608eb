"""Helpers that several folders of the trainer share."""
