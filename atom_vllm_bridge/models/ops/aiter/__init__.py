"""Ops by AMD's aiter: each file adapts one op of ops/torch to aiter's functions. Nothing here has run on such a GPU."""
