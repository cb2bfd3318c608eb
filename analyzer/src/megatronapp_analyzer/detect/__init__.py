"""Detection of slow and hanging ranks: finished steps become verdicts. Start at `engine.Detector`."""
