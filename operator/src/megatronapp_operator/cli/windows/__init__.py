"""`megatronapp trace window`: detailed spans of some steps of a running job."""
