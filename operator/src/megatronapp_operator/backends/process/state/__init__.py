"""State folder of the jobs on this machine."""
