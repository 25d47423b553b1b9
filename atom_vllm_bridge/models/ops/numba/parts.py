"""What layer.py forks besides products, attention and experts: the stretches between them in which each token is on its own."""

import numpy as np

from atom_vllm_bridge.models.ops.numba.dots import TOGETHER, dots
from atom_vllm_bridge.models.ops.numba.few import compiled
from atom_vllm_bridge.models.ops.numba.hc_pre import read_some
from atom_vllm_bridge.models.ops.numba.router import route
from atom_vllm_bridge.models.ops.numba.team import Body, array, next_chunk
from atom_vllm_bridge.models.ops.numba.write_keys import nearest


@compiled()
def settle(x, narrow):
    """Round to what bfloat16 holds, where the model is `narrow`."""
    if narrow:
        bits = x.reshape(-1).view(np.uint32)
        for c in range(bits.size):
            bits[c] = nearest(bits[c]) << np.uint32(16)


@compiled()
def token_chunks(team, tokens):
    """Into how many chunks to cut tokens: one a thread, and more where `dots` has enough in each."""
    return min(tokens, max(team.threads, (tokens + TOGETHER - 1) // TOGETHER))


@compiled()
def _tokens(words, chunk):
    tokens, chunks = words[2], words[1]
    return slice(tokens * chunk // chunks, tokens * (chunk + 1) // chunks)


def _read(words):
    """15 words, see `read_some`; then whether the model is narrow."""
    tokens, d = words[2], words[4]
    x = array(words[12], (tokens, d), np.float32)
    chunk = next_chunk(words)
    while chunk < words[1]:
        at = _tokens(words, chunk)
        read_some(words, at)
        settle(x[at], words[15] != 0)
        chunk = next_chunk(words)


def _read_and_route(words):
    """16 words as above; then experts, k, words of the vocabulary, and addresses. Without a vocabulary there is a bias instead of a table."""
    tokens, d, many, k, vocabulary = words[2], words[4], words[16], words[17], words[18]
    x = array(words[12], (tokens, d), np.float32)
    gate = array(words[19], (many, d), np.float32)
    bias = array(words[20], (0 if vocabulary else many,), np.float32)
    table = array(words[21], (vocabulary, k), np.int64)
    ids = array(words[22], (tokens,), np.int64)
    scale = array(words[23], (1,), np.float64)
    chosen = array(words[24], (tokens, k), np.int64)
    weights = array(words[25], (tokens, k), np.float32)
    chunk = next_chunk(words)
    while chunk < words[1]:
        at = _tokens(words, chunk)
        read_some(words, at)
        settle(x[at], words[15] != 0)
        logits = np.empty((at.stop - at.start, many), np.float32)
        dots(x[at], gate, logits)
        if vocabulary:
            for t in range(at.start, at.stop):
                for i in range(k):
                    chosen[t, i] = table[ids[t], i]
        route(logits, bias, scale[0], chosen[at], weights[at])
        chunk = next_chunk(words)


read, read_and_route = Body(_read), Body(_read_and_route)
