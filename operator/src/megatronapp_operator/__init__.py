"""The kopf operator of MegatronJobs, their process backend, and the command line."""
