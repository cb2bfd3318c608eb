"""Messages between forward and backward ranks."""
