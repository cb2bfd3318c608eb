"""Text from data sets in the format of the package `datasets`, streamed and resumed exactly."""
