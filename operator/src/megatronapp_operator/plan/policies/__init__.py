"""Policies: what the plan does about one concern each."""
