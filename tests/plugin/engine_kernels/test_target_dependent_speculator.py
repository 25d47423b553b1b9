"""Stand-ins for vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .batches import few_examples, tokens
from .harness import Launch, check

MODULE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
MAX_MODEL_LEN = 30
UNUSED = 2  # requests beyond the batch's

# (tokens in the batch, rejected, sampled)
members = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 2)).map(
        lambda r: (r[0], min(r[1], r[0] - 1), r[2])
    ),
    max_size=4,
)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefill_inputs(batch: list[tuple[int, int, int]]) -> Launch:
    count, max_reqs = len(batch), len(batch) + UNUSED
    total = sum(r[0] for r in batch)
    return Launch(
        f"{MODULE}._prepare_prefill_inputs_kernel",
        (count,),
        {
            "last_token_indices_ptr": torch.zeros(max_reqs, dtype=torch.int64),
            "draft_current_step_ptr": torch.tensor(5),
            "draft_input_ids_ptr": torch.zeros(total + 3, dtype=torch.int32),
            "draft_positions_ptr": torch.zeros(total + 3, dtype=torch.int64),
            "draft_query_start_loc_ptr": torch.zeros(max_reqs + 1, dtype=torch.int32),
            "draft_seq_lens_ptr": torch.zeros(max_reqs, dtype=torch.int32),
            "target_input_ids_ptr": tokens(total),
            "target_positions_ptr": tokens(total, dtype=torch.int64, seed=1),
            "idx_mapping_ptr": torch.arange(count - 1, -1, -1).int(),
            "last_sampled_ptr": tokens(max_reqs, 1, dtype=torch.int64, seed=2),
            "next_prefill_tokens_ptr": tokens(2, max_reqs, seed=3),
            "num_sampled_ptr": int32([r[2] for r in batch]),
            "num_rejected_ptr": int32([r[1] for r in batch]),
            "query_start_loc_ptr": int32([0, *(r[0] for r in batch)]).cumsum(0).int(),
            "seq_lens_ptr": tokens(count, seed=4),
            "max_num_reqs": max_reqs,
            "BLOCK_SIZE": 4,
        },
        outputs=(
            "last_token_indices_ptr",
            "draft_input_ids_ptr",
            "draft_positions_ptr",
            "draft_query_start_loc_ptr",
            "draft_seq_lens_ptr",
        ),
    )


def decode_inputs(count: int, advance: bool, columns: int) -> Launch:
    max_reqs = count + UNUSED
    drafts = tokens(count, columns, dtype=torch.int64)
    return Launch(
        f"{MODULE}._prepare_decode_inputs_kernel",
        (count + 1,),
        {
            "draft_tokens_ptr": drafts if columns > 1 else drafts[:, 0].contiguous(),
            "draft_tokens_stride": columns,
            "target_seq_lens_ptr": MAX_MODEL_LEN - tokens(count) % 3,
            "num_rejected_ptr": tokens(count, seed=1) % 3,
            "input_ids_ptr": torch.zeros(max_reqs, dtype=torch.int32),
            "positions_ptr": MAX_MODEL_LEN - 1 - tokens(max_reqs).long() % 4,
            "sample_src_positions_ptr": tokens(max_reqs, dtype=torch.int64, seed=2),
            "query_start_loc_ptr": torch.zeros(max_reqs + 1, dtype=torch.int32),
            "seq_lens_ptr": torch.zeros(max_reqs, dtype=torch.int32),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_reqs": max_reqs,
            "BLOCK_SIZE": 4,
            "ADVANCE_DRAFT_POSITIONS": advance,
        },
        outputs=("input_ids_ptr", "query_start_loc_ptr", "seq_lens_ptr"),
    )


def updated_inputs(count: int, step: int, advance: bool) -> Launch:
    steps, hidden = 3, 10
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count + 1, hidden + 2, generator=generator)
    return Launch(
        f"{MODULE}._update_draft_inputs_kernel",
        (count,),
        {
            "output_draft_tokens_ptr": torch.zeros(count, steps, dtype=torch.int64),
            "output_draft_tokens_stride": steps,
            "next_input_hidden_states_ptr": torch.zeros(count + 1, hidden),
            "next_input_hidden_states_stride": hidden,
            "input_ids_ptr": torch.zeros(count + 1, dtype=torch.int32),
            "positions_ptr": MAX_MODEL_LEN - 1 - tokens(count).long() % 4,
            "sample_src_positions_ptr": tokens(count, dtype=torch.int64),
            "seq_lens_ptr": MAX_MODEL_LEN - tokens(count) % 4,
            "draft_tokens_ptr": tokens(count, dtype=torch.int64, seed=1),
            "current_draft_step_ptr": torch.tensor(step),
            "hidden_states_ptr": states,
            "hidden_states_stride": states.stride(0),
            "hidden_size": hidden,
            "max_model_len": MAX_MODEL_LEN,
            "num_speculative_steps": steps,
            "BLOCK_SIZE": 4,
            "ADVANCE_DRAFT_POSITIONS": advance,
        },
        outputs=(
            "output_draft_tokens_ptr",
            "next_input_hidden_states_ptr",
            "input_ids_ptr",
        ),
    )


@few_examples
@given(batch=members)
def test_the_first_pass_equals_the_interpreted_kernel(batch: list) -> None:
    check(prefill_inputs(batch))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_second_pass_equals_the_interpreted_kernel(
    count: int, advance: bool, columns: int
) -> None:
    check(decode_inputs(count, advance, columns))


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_each_later_pass_equals_the_interpreted_kernel(
    count: int, step: int, advance: bool
) -> None:
    check(updated_inputs(count, step, advance))


def test_tokens_are_moved_by_one_and_end_in_the_sampled_one() -> None:
    launch = prefill_inputs([(4, 1, 1)])
    target = launch.arguments["target_input_ids_ptr"].tolist()
    sampled = launch.arguments["last_sampled_ptr"][0].item()
    after = check(launch)
    assert after["draft_input_ids_ptr"][:3].tolist() == [*target[1:3], sampled]
    assert after["last_token_indices_ptr"].tolist() == [2, 0, 0]
    assert after["draft_current_step_ptr"].item() == 0


def test_amid_a_prompt_the_next_prompt_token_follows() -> None:
    launch = prefill_inputs([(3, 0, 0)])
    following = launch.arguments["next_prefill_tokens_ptr"][0, 0].item()
    assert check(launch)["draft_input_ids_ptr"][2].item() == following


def test_the_last_step_changes_no_input() -> None:
    launch = updated_inputs(2, step=2, advance=True)
    after = check(launch)
    drafts = launch.arguments["draft_tokens_ptr"].tolist()
    assert after["output_draft_tokens_ptr"][:, 2].tolist() == drafts
    assert torch.equal(after["positions_ptr"], launch.arguments["positions_ptr"])


def test_positions_stop_at_the_context_length() -> None:
    launch = decode_inputs(4, advance=True, columns=3)
    launch.arguments["positions_ptr"][:] = MAX_MODEL_LEN - 1
    after = check(launch)
    assert (after["positions_ptr"] == MAX_MODEL_LEN - 1).all()
