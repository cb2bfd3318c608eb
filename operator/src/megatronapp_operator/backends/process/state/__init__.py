"""State folder of jobs on this machine."""
