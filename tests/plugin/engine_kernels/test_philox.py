"""Philox against published vectors, and tl.rand against the interpreter."""

import numpy as np
import torch
import triton
import triton.language as tl

from atom_vllm_bridge.engine_kernels.philox import philox4x32, uniform


def test_known_answers():
    """From kat_vectors of Random123, the authors' implementation."""
    ones = 0xFFFFFFFF
    counter = np.array([[0] * 4, [ones] * 4], np.uint64).T
    key = np.array([[0] * 2, [ones] * 2], np.uint64).T
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ]
    assert philox4x32(counter, key).T.tolist() == expected


@triton.jit
def _rand_kernel(out_ptr, seed_ptr, offset_ptr):
    i = tl.program_id(0)
    tl.store(out_ptr + i, tl.rand(tl.load(seed_ptr + i), tl.load(offset_ptr + i)))


def test_uniform_has_the_bits_of_tl_rand():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator)
    offsets = torch.randint(2**40, (200,), generator=generator)
    offsets[:50] = torch.arange(50)
    out = torch.empty(200)
    _rand_kernel[(200,)](out, seeds, offsets)
    assert (uniform(seeds.numpy(), offsets.numpy()) == out.numpy()).all()
