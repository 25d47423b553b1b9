"""Ops for a CPU with few tokens, compiled by numba.

A decode step is hundreds of operations on a few kilobytes, where calling into torch costs more than the arithmetic. Each file
here fuses one op into one call. Many tokens, values that need a gradient, or memory that is not contiguous go to the
reference in ops/torch, which then is faster or the only one that can.
"""
