"""Hub of one job: takes in the traces of all workers, names slow ranks, answers people, Prometheus and the operator."""
