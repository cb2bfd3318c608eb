"""Evidence that separates causes which look alike in the lengths of passes."""
