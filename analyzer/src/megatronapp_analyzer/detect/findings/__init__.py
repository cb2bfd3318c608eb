"""From suspects to verdicts: persistence, life cycle, confidence and sentences."""
