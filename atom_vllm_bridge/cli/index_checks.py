"""The self-test's checks of ops that derive a step's indices: three requests, one of them without a token, and padding."""

from typing import TYPE_CHECKING, Any

import torch

from atom_vllm_bridge.models.ops.blocks import Blocks
from atom_vllm_bridge.models.ops.registry import Op

if TYPE_CHECKING:
    from atom_vllm_bridge.cli.selftest import Draw

TOKENS, REQUESTS = 10, 3


class Step:
    """The tensors of the step, as models/deepseek_v4/state.py names them."""

    def __init__(self, draw: "Draw") -> None:
        kind = {"dtype": torch.int32, "device": draw.device}
        self.query_start_loc = torch.tensor([0, 3, 3, 8], **kind)
        self.seq_lens = torch.tensor([10, 4, 65], **kind)
        self.request = torch.tensor([0] * 3 + [2] * 7, device=draw.device)
        at = [7, 8, 9, *range(60, 65), 0, 0]
        self.positions = torch.tensor(at, device=draw.device)
        self.slots = draw.different(400, TOKENS)
        self.slots[8:] = -1
        # No block has the number 0.
        self.table = 1 + draw.different(15, REQUESTS, 5).int()

    def blocks(self, parts: int = 1) -> Blocks:
        return Blocks(self.table, 16, 48 * parts, parts)


def request_of_token(op: Op, draw: "Draw") -> Any:
    return op(Step(draw).query_start_loc, TOKENS)


def tiles(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    return op(step.query_start_loc, step.request, step.positions, 2, 8)


def rotations(op: Op, draw: "Draw") -> Any:
    return torch.view_as_real(op(draw.below(9999, 5), draw(4)))


def slot_rows(op: Op, draw: "Draw") -> Any:
    return op(Step(draw).slots, 16, 4, 12)


def ring_slots(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    where = step.query_start_loc, step.request, step.positions
    return op(step.table[:, :1], *where, 4)


def window_rows(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    first = torch.tensor([0, 0, 58], device=draw.device)
    where = step.request, step.positions, step.positions
    return op(step.blocks(), *where, first, 1, 8)


def block_rows(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    where = step.request[::5], step.positions[::5]
    return op(step.blocks(), *where, step.seq_lens, 5, 8)


def entry_rows(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    where = step.request, step.positions, step.positions
    return op(step.blocks(), *where, 1, 16, 4)


def selected_rows(op: Op, draw: "Draw") -> Any:
    return op(Step(draw).blocks(), Step(draw).request, draw.below(80, TOKENS, 6) - 1)


def pooled_rows(op: Op, draw: "Draw") -> Any:
    step = Step(draw)
    where = step.request, step.positions, step.slots
    *indices, rotation = op(step.blocks(4), step.blocks(), *where, 5, 4, 8, draw(4))
    return (*indices, torch.view_as_real(rotation))


CHECKS = (
    *(request_of_token, tiles, rotations, slot_rows, ring_slots),
    *(window_rows, block_rows, entry_rows, selected_rows, pooled_rows),
)
