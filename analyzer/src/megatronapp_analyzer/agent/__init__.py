"""Agent of one worker: reads the trace rings and sends them to the hub of the job."""
