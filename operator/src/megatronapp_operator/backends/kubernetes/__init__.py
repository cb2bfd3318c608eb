"""The backend on a cluster: a worker is a pod."""
