"""Run compiled code on the threads that torch has already: a second pool would fight with them for the cores.

A body is compiled for C and gets the address of int64 words: a counter, the number of chunks, then arguments of its own.
Each thread takes chunks off the counter until none is left, so a thread that is held up costs one chunk, not half of the
work; what a chunk computes does not depend on who takes it.
"""

import ctypes
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Chunks for each thread: as many as even the load out, as few as keep their start cheap.
CHUNKS = 4


def _fork() -> Any:
    """GOMP_parallel of the OpenMP runtime that torch runs on, which GNU's, Intel's and LLVM's all have; else None."""
    shipped = Path(torch.__file__).parent.glob("lib/lib*omp*")
    # One that was loaded before all others, as LD_PRELOAD does, is the one that torch calls too.
    for library in (None, *map(str, shipped)):
        try:
            fork = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            # Not a library of this platform, or not an OpenMP runtime.
            continue
        fork.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        fork.restype = None
        return fork
    return None


_parallel = _fork()
_parallel_address = ctypes.cast(_parallel, ctypes.c_void_p).value or 0


class Team(NamedTuple):
    """What compiled code needs to fork by itself.

    Attributes:
        fork: address of GOMP_parallel; 0: there is none.
        threads: of torch.
    """

    fork: int
    threads: int


def team() -> Team:
    """The threads that torch has now."""
    return Team(_parallel_address, torch.get_num_threads())


class Body:
    """A function of the words' address, compiled at its first run.

    Args:
        function: takes one `words` pointer; see `words` and `next_chunk`.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    @cached_property
    def compiled(self) -> Any:
        signature = types.void(types.CPointer(types.int64))
        try:
            return numba.cfunc(signature, cache=True)(self.function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.cfunc(signature)(self.function)

    @property
    def address(self) -> int:
        """For `fork`."""
        return int(self.compiled.address)

    def run(self, chunks: int, *arguments: int) -> None:
        """Run on torch's threads; returns when all chunks are done."""
        words = (ctypes.c_int64 * (2 + len(arguments)))(0, chunks, *arguments)
        threads = min(torch.get_num_threads(), chunks)
        if threads > 1 and _parallel is not None:
            _parallel(self.address, ctypes.addressof(words), threads, 0)
        else:
            self.compiled.ctypes(words)


def chunk_count(items: int) -> int:
    """Into how many chunks to cut `items` pieces of work."""
    threads = torch.get_num_threads()
    return 1 if threads == 1 else min(items, threads * CHUNKS)


@intrinsic
def next_chunk(typing: Any, words: Any) -> Any:
    """Take a number off the counter, which no other thread then gets."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(words), generate


@intrinsic
def _fork_or_call(typing: Any, team: Any, body: Any, words: Any, threads: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        address, flag = ir.IntType(64).as_pointer(), ir.IntType(32)
        parallel = b.extract_value(args[0], 0)
        array_ = context.make_array(signature.args[2])(context, b, args[2])
        data = b.bitcast(array_.data, address)
        run = ir.FunctionType(ir.VoidType(), [address])
        fork_ = ir.FunctionType(ir.VoidType(), [run.as_pointer(), address, flag, flag])
        many = b.icmp_signed(">", args[3], args[3].type(1))
        able = b.icmp_signed("!=", parallel, parallel.type(0))
        body_ = b.inttoptr(args[1], run.as_pointer())
        with b.if_else(b.and_(many, able)) as (then, otherwise):
            with then:
                count = b.trunc(args[3], flag)
                place = b.inttoptr(parallel, fork_.as_pointer())
                b.call(place, [body_, data, count, flag(0)])
            with otherwise:
                b.call(body_, [data])
        return context.get_dummy_value()

    return types.void(team, body, words, threads), generate


@numba.njit
def fork(team, body, words):
    """`Body.run` from compiled code: the words whole, counter and number of chunks included."""
    _fork_or_call(team, body, words, min(team.threads, words[1]))


@numba.njit
def chunks_of(team, items):
    """`chunk_count` in compiled code."""
    return 1 if team.threads == 1 else min(items, team.threads * CHUNKS)


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")
def array(address, shape, dtype):
    """The array at an address that came as a word."""
    return numba.carray(_pointer(np.int64(address)), shape, dtype)
