"""Conversion between the MegatronJob resource and the plan's types."""
