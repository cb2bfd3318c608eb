"""The backend without a cluster: a worker is a process group on this machine."""
