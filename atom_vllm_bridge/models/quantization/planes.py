"""fp8 and mxfp4 values as a GPU unpacks them fastest: in words of 32 bits, 32 of which hold several groups of 32 inputs.

Word u holds input u of each group. Group p of g lies in the words' low halves if p < g/2, else in their high ones, at bits from
which a shift and a mask make the bits of a bfloat16, for both halves at once. That bfloat16 is the value times 2^−OFFSET: its
exponent counts from another bias. A scale is kept for each group as the exponent byte of 2^OFFSET times it, so that one product
gives the value exactly. A half is laid out as

    fp8, g = 4      p mod 2 = 0: sign 15, exponent and mantissa 10 … 4      1: sign 11, 14 … 12 and 3 … 0
    mxfp4, g = 8    p mod 4 = 0: sign 15, exponent and mantissa 8 … 6       1: 12, 5 … 3    2: 9, 2 … 0     3: 14, 13 and 11 … 10
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

# Of one step, and inputs of a group.
WORDS = 32


@dataclass(frozen=True)
class Planes:
    """A format.

    Attributes:
        fields: for each p, by which (from, to, width) bits of a code become bits of a half.
        offset: OFFSET.
    """

    fields: tuple[tuple[tuple[int, int, int], ...], ...]
    offset: int

    @property
    def groups(self) -> int:
        """g."""
        return 2 * len(self.fields)

    @property
    def step(self) -> int:
        """Inputs that WORDS words hold, to which rows are filled up."""
        return WORDS * self.groups

    @property
    def largest_scale(self) -> int:
        """The byte of the largest scale that fits."""
        return 254 - self.offset

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """[R, a] codes → [R, ⌈a/step⌉ · WORDS] int32; inputs beyond the last are zeros."""
        code = pad(codes.int(), (0, -codes.shape[1] % self.step))
        code = code.view(len(code), -1, self.groups, WORDS)
        words = torch.zeros_like(code[:, :, 0])
        for p in range(self.groups):
            half, rest = divmod(p, len(self.fields))
            for source, target, width in self.fields[rest]:
                part = code[:, :, p] >> source & (1 << width) - 1
                words |= part << target + 16 * half
        return words.flatten(1)

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """The inverse, zeros at the end included: [R, a], int32."""
        word = words.view(len(words), -1, WORDS)
        found = []
        for p in range(self.groups):
            half, rest = divmod(p, len(self.fields))
            code = torch.zeros_like(word)
            for source, target, width in self.fields[rest]:
                part = word >> target + 16 * half & (1 << width) - 1
                code |= part << source
            found.append(code)
        return torch.stack(found, 2).flatten(1)


FP8 = Planes(
    fields=(
        ((7, 15, 1), (0, 4, 7)),
        ((7, 11, 1), (4, 12, 3), (0, 0, 4)),
    ),
    offset=120,
)
MXFP4 = Planes(
    fields=(
        ((3, 15, 1), (0, 6, 3)),
        ((3, 12, 1), (0, 3, 3)),
        ((3, 9, 1), (0, 0, 3)),
        ((3, 14, 1), (2, 13, 1), (0, 10, 2)),
    ),
    offset=126,
)
