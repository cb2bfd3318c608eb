"""Text for terminals, run-length lists and RE2 patterns."""
