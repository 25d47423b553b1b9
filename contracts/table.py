"""What a walk of our code cannot see of what it asks of vLLM, by hand.

Paths are "module:Qual.name".
"""

SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
RUNNER = "vllm.v1.worker.gpu.model_runner"

MIXINS = {"AtomPlatform": "vllm.platforms.interface:Platform"}
"""Our classes that are mixed in before a class of vLLM's, and what they count as."""

TYPES = {
    # vLLM's worker says V1's runner; under V2 it is V2's.
    "vllm.v1.worker.cpu_worker:CPUWorker.model_runner": f"{RUNNER}:GPUModelRunner",
    "vllm.v1.worker.gpu_worker:Worker.model_runner": f"{RUNNER}:GPUModelRunner",
    "atom_vllm_bridge.verification:watch.runner": f"{RUNNER}:GPUModelRunner",
    "atom_vllm_bridge.workers.step_costs:cost_curves.runner": f"{RUNNER}:GPUModelRunner",
    "atom_vllm_bridge.verification:Verdicts.__init__.speculator": (
        f"{SPECULATORS}.dspark.speculator:DSparkSpeculator"
    ),
    "atom_vllm_bridge.workers.step_costs:HostTimes.record_batch.input_batch": (
        "vllm.v1.worker.gpu.input_batch:InputBatch"
    ),
}
"""Parameters of ours that say nothing of their type, and attributes of vLLM's that say another."""

TARGET = "atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM"
DSPARK = "atom_vllm_bridge.dspark:AtomDSparkDraftModel"
MTP = "atom_vllm_bridge.mtp:AtomDeepseekV4MTP"
STATE = "atom_vllm_bridge.model_state:AtomModelState"
TIMES = "atom_vllm_bridge.workers.step_costs:HostTimes"

BASES = {
    STATE: "vllm.v1.worker.gpu.model_states.default:DefaultModelState",
    TARGET: "vllm.model_executor.models.interfaces:SupportsEagle3",
}
"""What answers for a class of ours where it does not itself."""

CALLERS = (
    (f"{RUNNER}?self.model", TARGET),
    (f"{SPECULATORS}.eagle.eagle3_utils?eagle3_model", TARGET),
    (f"{SPECULATORS}.eagle.utils?target_language_model", TARGET),
    (f"{RUNNER}?self.model_state", STATE),
    (f"{RUNNER}?self.step_timing", TIMES),
    (f"{SPECULATORS}.dspark.speculator?self.model", DSPARK),
    (f"{SPECULATORS}.dflash.speculator?self.model", DSPARK),
    (f"{SPECULATORS}.target_dependent_ar.speculator?self.model", MTP),
)
"""Where vLLM calls a class of ours by a contract that no base class spells out: the caller's name for it, and the class."""

NOT_ASKED_OF_US = {
    # Between the ranks of a pipeline, which is refused.
    (TARGET, "make_empty_intermediate_tensors"),
    # With dspark_draft_topk, which vLLM has for other architectures alone.
    (DSPARK, "apply_markov_bias_gathered"),
    # Where vLLM times its own graphs.
    (TIMES, "collect"),
    # Of EAGLE-3 drafts.
    (MTP, "combine_hidden_states"),
    # With images.
    (MTP, "embed_input_ids(1, is_multimodal, multimodal_embeddings)"),
}
"""What those modules ask only of models that are not ours: a name, or one way of calling it."""

OF_TORCH = frozenset({"modules", "parameters", "named_modules", "__class__"})
"""What a torch module has by itself."""

UTILS, PLANNING = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
PROBED = (
    (f"{UTILS}:get_kv_cache_groups", f"{PLANNING}:get_kv_cache_groups"),
    (
        f"{UTILS}:get_kv_cache_config_from_groups",
        f"{PLANNING}:get_kv_cache_config_from_groups",
    ),
)
"""What `compat.py` looks for: of each row one is there, wherever it is."""
