"""Conversion of the MegatronJob resource and of reports to the plan's types."""
