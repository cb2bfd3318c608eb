"""Profiles: parts of a job's spec that administrators own, merged below the job's own fields."""
