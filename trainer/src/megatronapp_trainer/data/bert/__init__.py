"""Training data of BERT: two texts of a document in either order, with masked tokens."""
