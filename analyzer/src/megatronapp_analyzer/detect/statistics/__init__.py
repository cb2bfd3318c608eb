"""Tests of columns of values for lasting shifts, in correlated noise."""
