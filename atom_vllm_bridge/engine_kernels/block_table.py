"""Stand-ins for the kernels of vllm.v1.worker.gpu.block_table.

G cache groups have a block table each, int32 [slots, stride], given by addresses.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atom_vllm_bridge.engine_kernels.memory import int32_at


def _gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Copy the blocks of the batch's requests, group by group; zero the padded rows.

    The grid is (G, padded requests). What stands in a row past the request's blocks
    is left as it was.

    Args:
        num_blocks_ptr: [G, slots].
    """
    groups, padded = grid[0], grid[1]
    slots = batch_idx_to_req_idx.numpy()[:num_reqs]
    num_blocks = num_blocks_ptr.numpy()
    for group, (source, target, stride) in enumerate(
        zip(
            src_block_table_ptrs.tolist()[:groups],
            dst_block_table_ptrs.tolist()[:groups],
            block_table_strides.tolist()[:groups],
            strict=True,
        )
    ):
        table = int32_at(target, padded, stride)
        if num_reqs < padded:
            table[num_reqs:] = 0
        blocks = num_blocks[group, slots]
        width = int(blocks.max(initial=0))
        if width:
            np.copyto(
                table[:num_reqs, :width],
                int32_at(source, num_blocks.shape[1], stride)[slots, :width],
                where=np.arange(width) < blocks[:, None],
            )


def _compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
    *,
    grid: tuple[int, ...],
    **options: Any,
) -> None:
    """Where each token's cache entry stands: block number · block size + offset.

    The grid is (G, B + 1): the last program pads. A token is PAD_ID in a group
    without a mapping, when its request is a dummy (slot −1), and, under context
    parallelism, when another rank holds it.

    Args:
        slot_mappings_ptr: [G, max_num_tokens] int64, written.
    """
    groups, count = grid[0], grid[1] - 1
    loc = query_start_loc.numpy()[: count + 1]
    first, last = int(loc[0]), int(loc[-1])
    mappings = slot_mappings_ptr.numpy()[:groups]
    mappings[:, last:max_num_tokens] = PAD_ID
    if first == last:
        return
    requests = idx_mapping.numpy()[:count]
    rows = int(requests.max()) + 1
    slots = requests.astype(np.int64).repeat(np.diff(loc))
    dummy = slots < 0 if requests.min() < 0 else None
    positions = pos.numpy()[first:last]
    sharded = dcp_sharded.numpy()
    parts: dict[tuple[int, bool], _Parts] = {}
    for group, (address, stride, block_size, enabled) in enumerate(
        zip(
            block_table_ptrs.tolist()[:groups],
            block_table_strides.tolist()[:groups],
            block_sizes.tolist()[:groups],
            slot_mapping_enabled.tolist()[:groups],
            strict=True,
        )
    ):
        if not enabled or not rows:
            mappings[group, first:last] = PAD_ID
            continue
        split = CP_SIZE != 1 and bool(sharded[group])
        part = parts.get((block_size, split))
        if part is None:
            part = _split(
                positions, block_size, cp_rank, CP_SIZE if split else 1, CP_INTERLEAVE
            )
            parts[block_size, split] = part
        blocks, offsets, elsewhere = part
        # Clipped: a dummy reads some block, and its token is padded below.
        numbers = (
            int32_at(address, rows, stride)
            .reshape(-1)
            .take(slots * stride + blocks, mode="clip")
        )
        mapping = mappings[group, first:last]
        # The product is int32, as in the kernel; the sum int64.
        np.add(numbers * np.int32(block_size), offsets, out=mapping)
        if elsewhere is not None:
            mapping[elsewhere] = PAD_ID
        if dummy is not None:
            mapping[dummy] = PAD_ID


_Parts = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]


def _split(
    positions: NDArray[np.int64],
    block_size: int,
    cp_rank: int,
    cp_size: int,
    interleave: int,
) -> _Parts:
    """Block index, offset in the block, and which positions other ranks hold.

    Under context parallelism a virtual block of block_size · cp_size positions is
    dealt to the ranks in runs of `interleave`.
    """
    if cp_size == 1:
        blocks, offsets = np.divmod(positions, block_size)
        return blocks, offsets, None
    blocks, virtual = np.divmod(positions, block_size * cp_size)
    elsewhere = virtual // interleave % cp_size != cp_rank
    runs = virtual // (interleave * cp_size)
    local = blocks * block_size + runs * interleave + virtual % interleave
    blocks, offsets = np.divmod(local, block_size)
    return blocks, offsets, elsewhere


_MODULE = "vllm.v1.worker.gpu.block_table"

OVERRIDES = {
    f"{_MODULE}._gather_block_tables_kernel": _gather_block_tables,
    f"{_MODULE}._compute_slot_mappings_kernel": _compute_slot_mappings,
}
