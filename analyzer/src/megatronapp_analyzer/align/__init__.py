"""Clock offsets between nodes, from the traffic of the training itself. Ranks of one boot id share a clock."""
