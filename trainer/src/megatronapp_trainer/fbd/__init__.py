"""MegaFBD: forward and backward passes on separate ranks."""
