"""Evaluation where stages are placed in a vee, so that the first rank has both ends of the model."""
