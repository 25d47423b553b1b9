"""vLLM's workers, for adaptive verification: where the runner, its speculator and the model state are all at hand.

One module a device: importing vLLM's CPU worker changes torch for the whole process.
"""
