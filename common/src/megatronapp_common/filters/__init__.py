"""Filter expressions over captured values: grammar, types, evaluation and plans for shards."""
