"""Probes: requests for exact values, and principal components."""
