"""The innermost product of few rows with a panel, written for the vector unit: numba's own loops leave most of it idle.

A tile is some rows × some columns of the output, whose sums stay in registers while the inputs go by: each line of the panel
is read once for all of the rows, widened from bfloat16 where it is stored so, and multiplied into each. Meanwhile lines that
are needed later are on their way from memory. Whatever the tile, a sum is taken over the inputs in their order, so that a row
does not depend on its company.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from atom_vllm_bridge.models.ops.panels import WIDTH


def _lanes() -> int:
    """float32 numbers that a vector register of this machine holds."""
    features = binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


_LANES = _lanes()
# Columns of the two vectors that are loaded together.
_PAIR = 2 * _LANES
# Rows of a tile of one pair: with what goes by, its sums fill the 16 registers of AVX2; 4 rows are enough to hide the latency
# of an addition, which takes 8 sums with two pipes of 4 cycles.
_MOST = 6
# Inputs, of which a tile reads a panel's lines several times: as many as stay in the first cache level.
_BLOCK = 128
_CACHE_LINE = 64
# Lines.
_AHEAD = 16
_FLOATS, _INTS = (
    ir.VectorType(kind, _LANES) for kind in (ir.FloatType(), ir.IntType(32))
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


def _wide(b: ir.IRBuilder, address: ir.Value, size: int) -> list[ir.Value]:
    """A pair as float32; of bfloat16, `size` 2, which is the upper half of one, the even columns and the odd ones."""
    if size == 4:
        places = [_vector(b, address, _FLOATS, part * _LANES * 4) for part in range(2)]
        return [b.load(place, align=4) for place in places]
    both = b.load(_vector(b, address, _INTS, 0), align=2)
    even = b.shl(both, ir.Constant(_INTS, [16] * _LANES))
    odd = b.and_(both, ir.Constant(_INTS, [0xFFFF0000] * _LANES))
    return [b.bitcast(value, _FLOATS) for value in (even, odd)]


def _swapped(b: ir.IRBuilder, pair: list[ir.Value], order: list[int]) -> list[ir.Value]:
    """Two vectors whose numbers change places: number i becomes what was number order[i]."""
    halves = order[:_LANES], order[_LANES:]
    return [b.shuffle_vector(*pair, ir.Constant(_INTS, half)) for half in halves]


# Columns of the even ones, then of the odd ones; and back.
_APART = [*range(0, _PAIR, 2), *range(1, _PAIR, 2)]
_TOGETHER = [_APART.index(column) for column in range(_PAIR)]


def _tile(rows: int, pairs: int) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any,
        x: Any,
        first: Any,
        panel: Any,
        skip: Any,
        out: Any,
        column: Any,
        goes_on: Any,
        later: Any,
        pace: Any,
    ) -> Any:
        """out[first : first + ROWS, column : column + PAIRS · 2 · LANES] = x[first : first + ROWS] · `panel` from column `skip` on, and panels after it.

        Added to what is there if it `goes_on`. With each input the line at the address `later`, which each time moves by
        `pace`, is called from memory; a tile as wide as a panel calls its own lines.
        """

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            kinds = signature.args
            x_, panel_, out_ = (
                _Array(context, b, kinds[i], args[i]) for i in (0, 2, 4)
            )
            size = kinds[2].dtype.bitwidth // 8
            inputs = b.extract_value(panel_.array.shape, 0)
            whole = b.mul(inputs, inputs.type(WIDTH * size))
            places = [b.add(args[1], args[1].type(r)) for r in range(rows)]
            zero = ir.Constant(_FLOATS, None)
            sums = [
                [cgutils.alloca_once_value(b, zero) for _ in range(2 * pairs)]
                for _ in places
            ]

            def each_pair(row: int) -> Iterator[tuple[list[ir.Value], list[ir.Value]]]:
                """A row's sums, and where they go."""
                address = out_.address(places[row], args[5])
                for n in range(0, 2 * pairs, 2):
                    to = [
                        _vector(b, address, _FLOATS, (n + part) * _LANES * 4)
                        for part in range(2)
                    ]
                    yield sums[row][n : n + 2], to

            for row in range(rows):
                for totals in sums[row]:
                    b.store(zero, totals)
            with b.if_then(args[6]):
                for row in range(rows):
                    for totals, places_ in each_pair(row):
                        pair = [b.load(place, align=4) for place in places_]
                        if size == 2:
                            pair = _swapped(b, pair, _APART)
                        for value, total in zip(pair, totals, strict=True):
                            b.store(value, total)
            multiply_add = cgutils.get_or_insert_function(
                b.module,
                ir.FunctionType(_FLOATS, [_FLOATS] * 3),
                f"llvm.fmuladd.v{_LANES}f32",
            )
            with cgutils.for_range(b, inputs) as loop:
                if pairs * _PAIR < WIDTH:
                    _prefetch(b, b.add(args[7], b.mul(loop.index, args[8])), 0)
                start = panel_.address(loop.index, args[3])
                line = []
                for n in range(pairs):
                    beside, within = divmod(n * _PAIR, WIDTH)
                    place = b.add(start, b.mul(whole, whole.type(beside)))
                    if pairs * _PAIR >= WIDTH and within == 0:
                        for offset in range(0, WIDTH * size, _CACHE_LINE):
                            _prefetch(b, place, _AHEAD * WIDTH * size + offset)
                    line += _wide(b, b.add(place, place.type(within * size)), size)
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
            for row in range(rows):
                for totals, places_ in each_pair(row):
                    values = [b.load(total) for total in totals]
                    if size == 2:
                        values = _swapped(b, values, _TOGETHER)
                    for value, place in zip(values, places_, strict=True):
                        b.store(value, place, align=4)
            return context.get_dummy_value()

        kinds = x, first, panel, skip, out, column, goes_on, later, pace
        return types.void(*kinds), generate

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


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Call the cache line at an address from memory."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _prefetch(b, args[0], 0)
        return context.get_dummy_value()

    return types.void(types.int64), generate


# As many panels side by side as it takes to have the sums; and one.
_one_wide, _one = _tile(1, 4), _tile(1, max(1, WIDTH // _PAIR))
_two_wide, _two = _tile(2, 2), _tile(2, max(1, WIDTH // _PAIR))
_three, _four, _five, _six = (_tile(rows, 1) for rows in range(3, _MOST + 1))


@numba.njit
def _some(x, first, rows, panel, out, column, goes_on, later, pace):
    """`product` of 3 to _MOST rows with lines of one panel."""
    for skip in range(0, WIDTH, _PAIR):
        at = column + skip
        if rows == 3:
            _three(x, first, panel, skip, out, at, goes_on, later, pace)
        elif rows == 4:
            _four(x, first, panel, skip, out, at, goes_on, later, pace)
        elif rows == 5:
            _five(x, first, panel, skip, out, at, goes_on, later, pace)
        else:
            _six(x, first, panel, skip, out, at, goes_on, later, pace)
        later += pace * panel.shape[0]


@numba.njit
def _many(x, panels, out, column):
    """`product` of 3 rows and more: block by block, while what follows in memory comes nearer."""
    rows, (count, inputs, _) = x.shape[0], panels.shape
    tiles = (rows + _MOST - 1) // _MOST
    pace = panels.itemsize * WIDTH // (tiles * (WIDTH // _PAIR))
    for p in range(count):
        for begin in range(0, inputs, _BLOCK):
            end = min(inputs, begin + _BLOCK)
            lines = panels[p, begin:end]
            later = lines.ctypes.data + lines.nbytes
            for i in range(tiles):
                t, stop = rows * i // tiles, rows * (i + 1) // tiles
                _some(
                    x[:, begin:end],
                    t,
                    stop - t,
                    lines,
                    out,
                    column + p * WIDTH,
                    begin > 0,
                    later + i * lines.nbytes // tiles,
                    pace,
                )


@numba.njit
def product(x, panels, out, column):
    """out[:, column : column + P · WIDTH] = x [T, a] · panels [P, a, WIDTH], float32; the panels in the bits of float32 or bfloat16."""
    rows, c, columns = x.shape[0], 0, panels.shape[0] * WIDTH
    if rows == 1:
        while c + 4 * _PAIR <= columns:
            at = column + c
            _one_wide(x, 0, panels[c // WIDTH], c % WIDTH, out, at, False, 0, 0)
            c += 4 * _PAIR
        while c < columns:
            _one(x, 0, panels[c // WIDTH], 0, out, column + c, False, 0, 0)
            c += WIDTH
    elif rows == 2:
        while c + 2 * _PAIR <= columns:
            at = column + c
            _two_wide(x, 0, panels[c // WIDTH], c % WIDTH, out, at, False, 0, 0)
            c += 2 * _PAIR
        while c < columns:
            _two(x, 0, panels[c // WIDTH], 0, out, column + c, False, 0, 0)
            c += WIDTH
    elif rows:
        _many(x, panels, out, column)
