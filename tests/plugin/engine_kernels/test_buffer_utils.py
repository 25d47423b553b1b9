"""The stand-in for vllm.v1.worker.gpu.buffer_utils against the interpreted kernel."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples, tokens
from .harness import Launch, Pointers, check

KERNEL = "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel"
ROWS, WIDTH = 5, 90

# (row, start, length, group)
writes = st.lists(
    st.tuples(
        st.integers(0, ROWS - 1),
        st.integers(0, 20),
        st.integers(1, 70),
        st.integers(0, 2),
    ),
    max_size=5,
)


def write(pieces: list[tuple[int, int, int, int]], dtype: torch.dtype) -> Launch:
    rows, starts, lengths, _ = zip(*pieces, strict=True) if pieces else ((),) * 4
    contents = tokens(sum(lengths), seed=1).to(dtype)
    return Launch(
        KERNEL,
        (len(pieces),),
        {
            "output_ptr": tokens(ROWS, WIDTH).to(dtype),
            "output_stride": WIDTH,
            "write_indices_ptr": torch.tensor(rows, dtype=torch.int32),
            "write_starts_ptr": torch.tensor(starts, dtype=torch.int32),
            "write_contents_ptr": contents,
            "write_cu_lens_ptr": torch.tensor(
                list(accumulate(lengths)), dtype=torch.int32
            ),
            "write_group_ids_ptr": None,
            "BLOCK_SIZE": 16,
            "MULTI_GROUP": False,
        },
    )


def write_groups(pieces: list[tuple[int, int, int, int]]) -> Launch:
    single = write(pieces, torch.int32)
    widths = (WIDTH, WIDTH + 4, WIDTH + 7)
    changes = {
        "output_ptr": Pointers([tokens(ROWS, width, seed=width) for width in widths]),
        "output_stride": torch.tensor(widths, dtype=torch.int64),
        "write_group_ids_ptr": torch.tensor([p[3] for p in pieces], dtype=torch.int32),
        "MULTI_GROUP": True,
    }
    return Launch(KERNEL, single.grid, single.arguments | changes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
@few_examples
@given(pieces=writes)
def test_equals_the_interpreted_kernel(dtype: torch.dtype, pieces: list) -> None:
    # The kernel of one group only runs when something was staged.
    check(write(pieces or [(0, 0, 1, 0)], dtype))


@few_examples
@given(pieces=writes)
def test_groups_equal_the_interpreted_kernel(pieces: list) -> None:
    check(write_groups(pieces or [(0, 0, 1, 2)]))


def test_the_later_of_two_writes_stays() -> None:
    launch = write([(1, 3, 4, 0), (1, 5, 4, 0)], torch.int32)
    contents = launch.arguments["write_contents_ptr"]
    row = check(launch)["output_ptr"][1]
    assert row[3:9].tolist() == contents[[0, 1, 4, 5, 6, 7]].tolist()


def test_single_elements_go_to_a_flat_state() -> None:
    launch = write([(4, 0, 1, 0), (0, 0, 1, 0), (2, 0, 1, 0)], torch.float32)
    flat = launch.arguments | {"output_ptr": torch.zeros(ROWS), "output_stride": 1}
    after = check(Launch(KERNEL, launch.grid, flat))
    contents = launch.arguments["write_contents_ptr"].tolist()
    assert after["output_ptr"].tolist() == [contents[1], 0, contents[2], 0, contents[0]]
