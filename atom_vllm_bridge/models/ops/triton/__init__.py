"""Ops for GPUs, NVIDIA's and AMD's, in Triton: a file an op, with the signature of its stem in ops/torch."""
