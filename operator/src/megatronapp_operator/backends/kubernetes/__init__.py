"""The backend on a cluster."""
