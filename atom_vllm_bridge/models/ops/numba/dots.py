"""Products of few rows with the rows of a small float32 matrix, which is stored output by output."""

import numpy as np

from atom_vllm_bridge.models.ops.numba.few import compiled

# Rows of x that share what is read of w.
TOGETHER = 4


@compiled(fastmath={"contract", "reassoc", "nsz"})
def dots(x, w, out):
    """out [T, M] = x [T, d] · w [M, d]ᵀ."""
    tokens, d = x.shape
    many = w.shape[0]
    shared = tokens - tokens % TOGETHER
    for t in range(0, shared, TOGETHER):
        x0, x1, x2, x3 = x[t], x[t + 1], x[t + 2], x[t + 3]
        for m in range(many):
            row = w[m]
            s0 = s1 = s2 = s3 = np.float32(0)
            for c in range(d):
                s0 += x0[c] * row[c]
                s1 += x1[c] * row[c]
                s2 += x2[c] * row[c]
                s3 += x3[c] * row[c]
            out[t, m], out[t + 1, m], out[t + 2, m], out[t + 3, m] = s0, s1, s2, s3
    for t in range(shared, tokens):
        for m in range(many):
            total = np.float32(0)
            for c in range(d):
                total += x[t, c] * w[m, c]
            out[t, m] = total
