"""Blame of stored steps: of those that users request, and now and then of the newest one."""
