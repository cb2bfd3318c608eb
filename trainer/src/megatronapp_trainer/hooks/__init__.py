"""Hooks: sites in the model, and observers of training steps."""
