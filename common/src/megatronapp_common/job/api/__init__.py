"""Types of the MegatronJob resource, a module for each block of the manifest."""
