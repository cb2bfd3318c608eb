"""Hub of one job: takes in the traces of all workers, names slow ranks, serves users, Prometheus and the operator."""
