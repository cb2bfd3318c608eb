"""Processes of ranks: environment, supervision and causes of failures."""
