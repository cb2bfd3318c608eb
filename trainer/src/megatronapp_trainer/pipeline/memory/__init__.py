"""Measurement of the memory that the tasks of a step keep."""
