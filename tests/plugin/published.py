"""The commands that the field publishes for this model, their parallel sizes replaced by 1, and their parser."""

import shlex
from dataclasses import dataclass, field

from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

ADAPTIVE = ',"enable_adaptive_verification":true'


@dataclass(frozen=True)
class Command:
    """
    Attributes:
        draft: of the checkpoint.
        text: the options.
        table: what the start says of them, on a CPU.
        environment: with which it is published.
    """

    draft: str
    text: str
    table: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


COMMANDS = {
    "MTP": Command(
        "mtp",
        """
        --tensor-parallel-size 1 --attention_backend ROCM_AITER_UNIFIED_ATTN
        --compilation-config '{"mode":3,"cudagraph_mode":"FULL_DECODE_ONLY"}'
        --speculative-config '{"method":"mtp","num_speculative_tokens":3,"attention_backend":"ROCM_AITER_UNIFIED_ATTN"}'
        --kv-cache-dtype fp8 --distributed-executor-backend mp
        --max_model_len 4096 --max-num-batched-tokens 8192 --max_num_seqs 256 --tokenizer-mode deepseek_v4
        --tool-call-parser deepseek_v4 --trust-remote-code
        """,
        {
            "cache dtype": "fp8 → fp8_ds_mla",
            "speculation": "mtp, K = 3 (trained for 1; drafts of another length are accepted less)",
            "compilation": "VLLM_COMPILE → NONE",
            "graph mode": "FULL_DECODE_ONLY → NONE",
            "batched tokens": "8192",
            "async scheduling": "on",
            "attention": "ROCM_AITER_UNIFIED_ATTN → sparse_attention of {}",
        },
        {"VLLM_ROCM_USE_AITER": "1", "SAFETENSORS_FAST_GPU": "1"},
    ),
    "DSpark": Command(
        "dspark",
        """
        --served-model-name dsv4flash --tensor-parallel-size 1 --data-parallel-size 1 --async-scheduling
        --enable-prefix-caching --max-model-len 32768 --max-num-seqs 256 --max-num-batched-tokens 16384
        --distributed-executor-backend mp --gpu-memory-utilization 0.8 --kv-cache-dtype fp8 --trust-remote-code
        --moe-backend aiter --tokenizer-mode deepseek_v4 --reasoning-parser deepseek_v4
        --compilation-config '{"mode":3,"cudagraph_mode":"FULL_AND_PIECEWISE","max_cudagraph_capture_size":2048}'
        --speculative-config '{"method":"dspark","num_speculative_tokens":7}'
        """,
        {
            "cache dtype": "fp8 → fp8_ds_mla",
            "prefix cache": "on, hits end on 128 tokens",
            "speculation": "dspark, K = 7 (trained for 5; drafts of another length are accepted less)",
            "compilation": "VLLM_COMPILE → NONE",
            "graph mode": "FULL_AND_PIECEWISE → NONE",
            "batched tokens": "16384",
            "async scheduling": "on",
            "experts": "--moe-backend aiter → experts of {}",
        },
        {
            "VLLM_ROCM_USE_AITER": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
            "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": "8192",
            "AITER_USE_CK_MOE_SORTING": "0",
            "AITER_USE_FLYDSL_MOE_SORTING": "0",
            "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY": "0",
        },
    ),
    "DSpark, the method alone": Command(
        "dspark",
        """ --tensor-parallel-size 1 --speculative-config '{"method":"dspark"}'""",
        {
            "prefix cache": "on, hits end on 128 tokens",
            "speculation": "dspark, K = 5 (trained for 5)",
            "batched tokens": "2048 → 1024",
            "async scheduling": "on",
        },
    ),
}


def adaptive_command() -> str:
    text = COMMANDS["DSpark"].text.replace(":7}", f":7{ADAPTIVE}}}")
    assert ADAPTIVE in text
    return text


def parsed(checkpoint, text):
    """What `vllm serve` makes of the options."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([str(checkpoint), *shlex.split(text)])
    args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args
