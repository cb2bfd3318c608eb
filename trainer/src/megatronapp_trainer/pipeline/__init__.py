"""Pipeline schedules of a training step."""
