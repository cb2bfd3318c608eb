"""Policies of the plan, one for each concern."""
