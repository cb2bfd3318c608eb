"""The timeline of one step, whole or in parts."""
