"""Orders of the passes of a training step: static plans, policies that decide during the step, and their simulation."""
