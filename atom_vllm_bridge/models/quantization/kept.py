"""Matrices as a GPU keeps them: output by output, in the format in which the checkpoint stores them.

Where a step has few tokens it is as fast as weights come from memory, so a matrix that arrives in fp8 or mxfp4 stays so, and
the ops that multiply with it (ops/triton) unpack it in registers. What format a matrix has is known when its first tensor
arrives; only then does it get memory. Scales are held for each output and 32 inputs of it, not for blocks, so that matrices can
be laid side by side wherever they end, and both formats are read alike; for fp8 that is 1/32 more bytes.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from . import block_fp8, mxfp4
from .planes import FP8, MXFP4, WORDS, Planes

PLANES = {"fp8": FP8, "mxfp4": MXFP4}
# Outputs that a kernel takes at once, at least.
LEAST_TILE = 32


class Band:
    """Outputs that lie in one piece, and have one format.

    Attributes:
        rows: R, how many.
        format: `plain`, `fp8` or `mxfp4`.
        values: plain [R, a] in `dtype`; else int32 words (planes.py), as many for each output.
        scales: [R, S] uint8, with the format's offset; None where plain.
        repacked: whether an op has put values into an order of its own, in which no other reads them.
        whole, start: the band whose memory this one shows, which may be itself, and the place of the first output in it.
    """

    def __init__(
        self,
        rows: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        format: str = "plain",
        values: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        self.rows, self.inputs, self.dtype, self.device = rows, inputs, dtype, device
        self.format, self._values, self.scales = format, values, scales
        self.whole, self.start = self, 0
        self._repacked = False

    @property
    def repacked(self) -> bool:
        return self.whole._repacked

    @repacked.setter
    def repacked(self, value: bool) -> None:
        self.whole._repacked = value

    @property
    def values(self) -> torch.Tensor:
        if self._values is None:
            raise ValueError(
                f"weights: a matrix of {self.rows} × {self.inputs} was used before anything was loaded into it."
            )
        if self.repacked:
            raise ValueError(
                "weights: one op has put a matrix into an order of its own, and another one reads it; "
                "let ATOM_BRIDGE_OPS name one provider of the ops that multiply with it in the whole process."
            )
        return self._values

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a quantised band, in whatever order."""
        assert self._values is not None
        assert self.scales is not None
        return self._values, self.scales

    def cut(self, first: int, end: int) -> "Band":
        """The outputs first … end − 1, over the same memory."""
        values = self.values if self._values is None else self._values
        part = Band(
            end - first,
            self.inputs,
            self.dtype,
            self.device,
            self.format,
            values[first:end],
            None if self.scales is None else self.scales[first:end],
        )
        part.whole, part.start = self.whole, self.start + first
        return part

    def dequantize(self) -> torch.Tensor:
        """[R, a], the exact values: as they are where plain, else float32."""
        if self.scales is None:
            return self.values
        planes = PLANES[self.format]
        codes = planes.unpack(self.values)
        scale = (self.scales - planes.offset).view(torch.float8_e8m0fnu)
        if planes is MXFP4:
            whole = mxfp4.dequantize(mxfp4.pack(codes), scale)
        else:
            whole = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
            whole = whole.unflatten(1, (-1, WORDS))
            whole = (whole * scale.float().unsqueeze(-1)).flatten(1)
        return whole[:, : self.inputs]

    def fill(self, first: int, values: torch.Tensor) -> None:
        """Take plain values [r, a] as outputs first … first + r − 1."""
        if self._values is None or self.repacked:
            self._values = self._empty(self.inputs, self.dtype)
            self.format, self.scales, self.repacked = "plain", None, False
        elif self.scales is not None:
            self._values = self.dequantize().to(self.dtype)
            self.format, self.scales = "plain", None
        self._values[first : first + len(values)].copy_(values)

    def fill_quantized(
        self, first: int, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Take a published pair, [r, a] and its scale, as it is; plain if this band is, or if a kernel would not get it right."""
        fp8 = weight.dtype == torch.float8_e4m3fn
        name = "fp8" if fp8 else "mxfp4"
        planes, exponents = PLANES[name], _exponents(scale)
        fits = exponents is not None and _within(exponents, planes)
        if fp8 and fits:
            # Its bits have no meaning of their own to a kernel.
            fits = not bool((weight.view(torch.uint8) & 127 == 127).any())
        held = self._values is None or self.format == name
        weight, scale = weight.to(self.device), scale.to(self.device)
        if exponents is None or not fits or not held:
            dequantize = block_fp8.dequantize if fp8 else mxfp4.dequantize
            self.fill(first, dequantize(weight, scale))
            return
        exponents = exponents.to(self.device)
        code = weight.view(torch.uint8)
        if fp8:
            exponents = exponents.repeat_interleave(block_fp8.BLOCK, 0)[: len(code)]
            exponents = exponents.repeat_interleave(block_fp8.BLOCK // WORDS, 1)
        else:
            code = torch.stack((code & 15, code >> 4), -1).flatten(1)
        words = planes.pack(code)
        # Zeros may have any scale but one that is not a number.
        columns = words.shape[1] // WORDS * planes.groups
        fill = planes.largest_scale
        exponents = pad(exponents, (0, columns), value=fill)[:, :columns]
        if self._values is None:
            self._values = self._empty(words.shape[1], torch.int32)
            self.scales = self._empty(columns, torch.uint8)
            self.format = name
        assert self.scales is not None
        # All of the matrix is loaded again, or nothing.
        self.repacked = False
        self._values[first : first + len(words)].copy_(words)
        self.scales[first : first + len(words)].copy_(exponents + planes.offset)

    def _empty(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.rows, columns, dtype=dtype, device=self.device)


class Kept:
    """A matrix, or several of one shape, of which each output lies in one piece.

    Args:
        outputs: of each band; with `count` there is one.
        inputs: of all.
        count: how many matrices; None: one, without a dimension for it.
        dtype: of what is not quantised.
    """

    def __init__(
        self,
        outputs: Sequence[int],
        inputs: int,
        count: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.count, self.inputs = count, inputs
        self.bands = [
            Band((count or 1) * rows, inputs, dtype, device) for rows in outputs
        ]
        # Zeros, one a tile, in which kernels that cut a product along its inputs count the parts that are ready; they leave zeros.
        tiles = (count or 1) * sum(-(-rows // LEAST_TILE) for rows in outputs)
        self.arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)

    @property
    def outputs(self) -> int:
        """Of one matrix."""
        return sum(band.rows for band in self.bands) // (self.count or 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Input by input, as a plain parameter's."""
        one = (self.inputs, self.outputs)
        return one if self.count is None else (self.count, *one)

    def columns(self, first: int, end: int) -> "Kept":
        """The outputs first … end − 1 of one matrix, over the same memory."""
        part = object.__new__(Kept)
        part.count, part.inputs, part.arrivals = None, self.inputs, self.arrivals
        part.bands, start = [], 0
        for band in self.bands:
            low, high = max(first - start, 0), min(end - start, band.rows)
            if low < high:
                part.bands.append(band.cut(low, high))
            start += band.rows
        return part

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, input by input: [a, b] or [E, a, b], of which [.., b, a] is contiguous."""
        whole = torch.cat([band.dequantize().to(dtype) for band in self.bands])
        if self.count is not None:
            whole = whole.unflatten(0, (self.count, -1))
        return whole.mT

    def rows(self, first: int, end: int) -> "Part":
        """Where a published matrix goes: rows of all matrices, one after another.

        Raises:
            ValueError: they lie in two bands.
        """
        start = 0
        for band in self.bands:
            if start <= first and end <= start + band.rows:
                return Part(band, first - start, end - start)
            start += band.rows
        raise ValueError(f"weights: rows {first} to {end} lie in two bands.")


class Part:
    """Rows of a band, [r, a], that one tensor of a checkpoint fills; for `loading` it looks like a tensor."""

    def __init__(self, band: Band, first: int, end: int) -> None:
        self.band, self.first = band, first
        self.shape = torch.Size((end - first, band.inputs))
        self.dtype, self.device = band.dtype, band.device

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return 2

    def is_floating_point(self) -> bool:
        return True

    def copy_(self, values: torch.Tensor) -> None:
        """Fill with plain values."""
        self.band.fill(self.first, values)

    def keep(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Fill with a quantised pair, whose shapes are right."""
        self.band.fill_quantized(self.first, weight, scale)


def _exponents(scale: torch.Tensor) -> torch.Tensor | None:
    """The bytes of an E8M0 scale; of a float32 one too, if all are powers of two, which else are None."""
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    bits = scale.contiguous().view(torch.int32)
    if bool(((bits & 0x7FFFFF) != 0).any()) or bool((bits < 0).any()):
        return None
    return (bits >> 23).to(torch.uint8)


def _within(exponents: torch.Tensor, planes: Planes) -> bool:
    """Whether all scales are numbers, and are kept exactly."""
    return bool(((exponents >= 1) & (exponents <= planes.largest_scale)).all())
