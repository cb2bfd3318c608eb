"""Suspects become verdicts: persistence, life cycle, confidence and sentences."""
