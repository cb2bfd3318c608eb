"""Backends: what carries out a plan."""
