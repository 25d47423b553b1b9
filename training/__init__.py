"""The training data and the training of the small checkpoint that is shipped."""
