"""Digests of the kernels that the stand-ins were written against.

A kernel with another digest is left to the interpreter: slow, and never wrong. After
the stand-ins were compared with the kernels of a new vLLM, print the new table with

    python -m atom_vllm_bridge.engine_kernels.fingerprints
"""

import hashlib
import inspect
import io
import textwrap
import tokenize
from typing import Any

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
}


def digest(kernel: Any) -> str:
    """16 hexadecimal digits of the kernel's tokens, comments left out.

    Args:
        kernel: as triton.jit returns it. Anything else, such as a stand-in that
            another plugin registered, has the digest "".
    """
    if not hasattr(kernel, "fn"):
        return ""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = " ".join(token.string for token in tokens if token.type not in _LAYOUT)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


KERNELS = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": "13fa8b8efb90c8e1",
    "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": "58a05c12a0b49791",
    "vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel": "ef50ff222d77970b",
    "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel": "94f616600c1df5ad",
    "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel": "355bcf5dfc45e72a",
    "vllm.v1.worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel": "9e98b5bee5ea7045",
    "vllm.v1.worker.gpu.input_batch._expand_idx_mapping_kernel": "1405e80c88675ad3",
    "vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel": "5307eeccac33128c",
    "vllm.v1.worker.gpu.input_batch._post_update_kernel": "5d49e95787e1eb7a",
    "vllm.v1.worker.gpu.input_batch._post_update_num_computed_tokens_kernel": "41a13e5cb2e6d89b",
    "vllm.v1.worker.gpu.input_batch._prepare_pos_seq_lens_kernel": "ada27c9ef2d2945a",
    "vllm.v1.worker.gpu.input_batch._prepare_prefill_inputs_kernel": "5e5fad7300d7fd6b",
    "vllm.v1.worker.gpu.metrics.logits._num_nans_kernel": "d1064090ee957c2e",
    "vllm.v1.worker.gpu.sample.bad_words._bad_words_kernel": "fbc33a7f4ccedbb5",
    "vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel": "04aae9952cc1de12",
    "vllm.v1.worker.gpu.sample.gumbel._temperature_kernel": "7a3f00749bcd8a71",
    "vllm.v1.worker.gpu.sample.logit_bias._bias_kernel": "f3d30732cd6f4b86",
    "vllm.v1.worker.gpu.sample.logprob._fill_logprob_token_ids_kernel": "b71467bbcfa364f5",
    "vllm.v1.worker.gpu.sample.logprob._ranks_kernel": "68f3df883d209f0f",
    "vllm.v1.worker.gpu.sample.logprob._topk_log_softmax_kernel": "641b41ec2bd830ef",
    "vllm.v1.worker.gpu.sample.min_p._min_p_kernel": "b02022b13813279e",
    "vllm.v1.worker.gpu.sample.penalties._bincount_kernel": "b46bb9a7df5409dd",
    "vllm.v1.worker.gpu.sample.penalties._penalties_kernel": "7cd6cce20ecda2dd",
    "vllm.v1.worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": "d2ec8efece57c7b3",
    "vllm.v1.worker.gpu.sample.thinking_budget._thinking_budget_kernel": "5460dee37492d351",
    "vllm.v1.worker.gpu.sample.thinking_budget._update_committed_marker_cache_kernel": "7f12b53a1c43f314",
    "vllm.v1.worker.gpu.spec_decode.acceptance_estimator._accumulate_kernel": "8ef8aec3e6259274",
    "vllm.v1.worker.gpu.spec_decode.acceptance_estimator._local_max_sumexp_kernel": "b2cc976b33e4aaba",
    "vllm.v1.worker.gpu.spec_decode.acceptance_estimator._predict_kernel": "ee93e970e3218c0a",
    "vllm.v1.worker.gpu.spec_decode.acceptance_estimator._refit_kernel": "a0b535cdadbcd95a",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": "8bff08c56686992d",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler._flatten_sampled_kernel": "43c5511891820c1f",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel": "92a47f3d07577e98",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel": "5ce4159c415821dd",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": "84a6970e074ab930",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel": "17385188fe9f5c52",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._insert_resampled_kernel": "452049f60bae3810",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._rejection_kernel": "138a70acd5716c94",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._resample_kernel": "f7ab6ad06cab03f0",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel": "d791590252b14b21",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel": "5be4e5fc08117967",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": "33be0322c30c050c",
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": "66658f4d15ce1357",
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": "30fbf65f9684fe23",
}


def main() -> None:
    """Print the table for the installed vLLM."""
    from atom_vllm_bridge.engine_kernels import find_kernel, interpreter, overrides

    interpreter.install()
    print("KERNELS = {")
    for name in sorted(overrides()):
        print(f'    "{name}": "{digest(find_kernel(name))}",')
    print("}")


if __name__ == "__main__":
    main()
