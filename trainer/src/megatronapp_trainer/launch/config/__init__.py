"""Settings and addresses of a launcher."""
