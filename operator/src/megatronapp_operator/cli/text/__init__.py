"""Texts of the command line: tables, durations, numbers and messages."""
