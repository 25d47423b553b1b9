"""The innermost product of few rows with a panel, written for the vector unit: numba's own loops leave most of it idle.

A tile is ROWS × WIDTH outputs whose sums stay in registers while the inputs go by: each line of the panel is read once,
widened from bfloat16 where it is stored so, and multiplied into every row. Meanwhile the same line of the next panel is
on its way from memory.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from atom_vllm_bridge.models.ops.panels import WIDTH

_LANES = 16
_PARTS = range(WIDTH // _LANES)
_CACHE_LINE = 64
# Lines.
_AHEAD = 16
_FLOATS, _INTS, _HALVES = (
    ir.VectorType(kind, _LANES)
    for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16))
)


class _Array:
    """A two-dimensional array in generated code."""

    def __init__(self, context: Any, b: ir.IRBuilder, kind: Any, value: Any) -> None:
        self.b, self.array = b, context.make_array(kind)(context, b, value)

    def address(self, row: ir.Value, column: ir.Value) -> ir.Value:
        b, array = self.b, self.array
        step = b.extract_value(array.strides, 0)
        start = b.add(b.ptrtoint(array.data, step.type), b.mul(row, step))
        return b.add(start, b.mul(column, array.itemsize))


def _vector(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int) -> Any:
    place = b.add(address, address.type(offset))
    return b.inttoptr(place, kind.as_pointer())


def _line(b: ir.IRBuilder, address: ir.Value, size: int) -> list[ir.Value]:
    """A panel's line as vectors of float32; bfloat16, `size` 2, is the upper half of one."""
    if size == 4:
        places = [_vector(b, address, _FLOATS, part * _LANES * 4) for part in _PARTS]
        return [b.load(place, align=4) for place in places]
    places = [_vector(b, address, _HALVES, part * _LANES * 2) for part in _PARTS]
    wide = [b.zext(b.load(place, align=2), _INTS) for place in places]
    upper = ir.Constant(_INTS, [16] * _LANES)
    return [b.bitcast(b.shl(value, upper), _FLOATS) for value in wide]


def _tile(rows: int, panels: int) -> Callable[..., None]:
    @intrinsic
    def tile(typing: Any, x: Any, first: Any, panel: Any, out: Any, column: Any) -> Any:
        """out[first : first + ROWS, column : column + PANELS · WIDTH] = x[first : first + ROWS] · panel and those after it."""

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            kinds = signature.args
            x_, panel_, out_ = (
                _Array(context, b, kinds[i], args[i]) for i in (0, 2, 3)
            )
            size = kinds[2].dtype.bitwidth // 8
            inputs = b.extract_value(panel_.array.shape, 0)
            step = b.mul(inputs, inputs.type(WIDTH * size))
            places = [b.add(args[1], args[1].type(r)) for r in range(rows)]
            vectors = range(panels * len(_PARTS))
            zero = ir.Constant(_FLOATS, None)
            sums = [
                [cgutils.alloca_once_value(b, zero) for _ in vectors] for _ in places
            ]
            multiply_add = cgutils.get_or_insert_function(
                b.module,
                ir.FunctionType(_FLOATS, [_FLOATS] * 3),
                f"llvm.fmuladd.v{_LANES}f32",
            )
            with cgutils.for_range(b, inputs) as loop:
                start = panel_.address(loop.index, inputs.type(0))
                line = []
                for _ in range(panels):
                    for offset in range(0, WIDTH * size, _CACHE_LINE):
                        _prefetch(b, start, _AHEAD * WIDTH * size + offset)
                    line += _line(b, start, size)
                    start = b.add(start, step)
                for place, totals in zip(places, sums, strict=True):
                    address = x_.address(place, loop.index)
                    value = b.load(_vector(b, address, ir.FloatType(), 0), align=4)
                    lane = b.insert_element(
                        ir.Constant(_FLOATS, ir.Undefined), value, ir.IntType(32)(0)
                    )
                    every = b.shuffle_vector(lane, lane, ir.Constant(_INTS, None))
                    for part, total in zip(line, totals, strict=True):
                        added = b.call(multiply_add, [part, every, b.load(total)])
                        b.store(added, total)
            for place, totals in zip(places, sums, strict=True):
                address = out_.address(place, args[4])
                for part, total in zip(vectors, totals, strict=True):
                    to = _vector(b, address, _FLOATS, part * _LANES * 4)
                    b.store(b.load(total), to, align=4)
            return context.get_dummy_value()

        return types.void(x, first, panel, out, column), generate

    return tile


def _prefetch(b: ir.IRBuilder, address: ir.Value, offset: int) -> None:
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = cgutils.get_or_insert_function(
        b.module,
        ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]),
        "llvm.prefetch.p0i8",
    )
    # Of data, to be read, into the first cache level.
    b.call(
        prefetch,
        [_vector(b, address, ir.IntType(8), offset), flag(0), flag(3), flag(1)],
    )


# Rows, and panels side by side: as many sums at once as it takes to never wait for one.
_one_by_four, _one = _tile(1, 4), _tile(1, 1)
_two_by_two, _two = _tile(2, 2), _tile(2, 1)
_four, _eight = _tile(4, 1), _tile(8, 1)


@numba.njit
def product(x, panels, out, column):
    """out[:, column : column + P · WIDTH] = x [T, a] · panels [P, a, WIDTH], float32; the panels in the bits of float32 or bfloat16."""
    rows, count = x.shape[0], panels.shape[0]
    for p in range(count):
        for t in range(0, rows - 7, 8):
            _eight(x, t, panels[p], out, column + p * WIDTH)
        if rows & 4:
            _four(x, rows & ~7, panels[p], out, column + p * WIDTH)
    t, p = rows & ~3, 0
    if rows & 2:
        while p + 2 <= count:
            _two_by_two(x, t, panels[p], out, column + p * WIDTH)
            p += 2
        if p < count:
            _two(x, t, panels[p], out, column + p * WIDTH)
        t += 2
    if rows & 1:
        p = 0
        while p + 4 <= count:
            _one_by_four(x, t, panels[p], out, column + p * WIDTH)
            p += 4
        while p < count:
            _one(x, t, panels[p], out, column + p * WIDTH)
            p += 1
