"""From part frames of ranks to merged steps."""
