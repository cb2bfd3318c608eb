"""From finished steps to verdicts. Start at `engine.Detector`."""
