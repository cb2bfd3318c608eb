"""Types of the MegatronJob resource."""
