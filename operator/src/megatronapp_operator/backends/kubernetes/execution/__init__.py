"""Execution of the plan's actions on a cluster."""
