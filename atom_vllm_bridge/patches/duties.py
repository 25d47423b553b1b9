"""What other plugins patch vLLM for, and an official hook of vLLM now does.

Each with the hook, what of the bridge answers to it, and the test that shows it.
"""

from atom_vllm_bridge.patches.registry import PATCHES, Duty

MODEL_STATE = "vllm.v1.worker.gpu.model_states.interface:ModelState"
BACKEND = "vllm.v1.attention.backend:AttentionBackend"
BUILDER = "vllm.v1.attention.backend:AttentionMetadataBuilder"
LAYER = "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"
DFLASH = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
PLATFORM = "vllm.platforms.interface:Platform"

CONTRACT = "tests/plugin/test_draft_contract.py"
IN_ENGINE = "tests/plugin/test_draft_in_engine.py"
DRAFT_KV = "tests/plugin/test_vllm_dspark_draft_kv_patch.py"
ASYNC = "tests/plugin/test_vllm_v4_async_scheduling_guards.py"
RINGS = "tests/plugin/test_ring_state.py"
INVARIANCE = "tests/plugin/test_engine_invariance.py"
ROCM = "tests/plugin/test_rocm.py"

DUTIES = [
    Duty(
        id="platform",
        instead_of="vllm.platforms.current_platform",
        what="Serve through a platform of the plugin's own.",
        hook="vllm.plugins:PLATFORM_PLUGINS_GROUP",
        used="atom_vllm_bridge.plugin:register_platform",
        test="tests/plugin/test_platform.py::test_the_plugin_brings_platform_model_and_interpreter",
    ),
    Duty(
        id="model-classes",
        instead_of="ModelRegistry and the caches of its look-ups",
        what="Take the place of vLLM's model classes under their names.",
        hook="vllm.model_executor.models.registry:ModelRegistry.register_model",
        used="atom_vllm_bridge.plugin:register_models",
        test=f"{CONTRACT}::test_vllms_names_resolve_to_our_classes",
    ),
    Duty(
        id="checkpoint-format",
        instead_of="the table of quantization methods; Attention.process_weights_after_loading",
        what="Load a checkpoint whose layout the native model reads off its tensors.",
        hook="vllm.model_executor.layers.quantization:register_quantization_config",
        used="atom_vllm_bridge.weights:CheckpointFormat",
        test="tests/plugin/test_agreement_with_transformers.py::test_all_fp8_gives_the_reference_to_a_thousandth",
    ),
    Duty(
        id="block-reuse",
        instead_of="BlockPool.free_blocks, KVCacheManager.__init__",
        what="Let a freed block be used again at once: state lies in blocks that vLLM hands out, and nowhere else.",
        hook=f"{LAYER}.get_kv_cache_spec",
        used="atom_vllm_bridge.kv_cache:CacheLayer.get_kv_cache_spec",
        test=f"{INVARIANCE}::test_a_freed_block_may_be_reused_at_once",
    ),
    Duty(
        id="profiling-cache",
        instead_of="GPUModelRunner.initialize_kv_cache, GPUModelRunner.profile_cudagraph_memory",
        what="Live with the small cache that vLLM profiles with, which the real one replaces.",
        hook=f"{LAYER}.bind_kv_cache",
        used="atom_vllm_bridge.kv_cache:CacheLayer.bind_kv_cache",
        test="tests/plugin/test_kv_cache.py::test_a_layer_goes_on_with_the_cache_that_it_was_given_last",
    ),
    Duty(
        id="prefix-rollback",
        instead_of="KVCacheManager.get_computed_blocks",
        what=(
            "Give a prefix hit the state that it continues from. Paged: window and rolling "
            "state come back with their blocks, so that nothing is rolled back."
        ),
        hook="vllm.v1.kv_cache_interface:SlidingWindowMLASpec",
        used="atom_vllm_bridge.kv_cache:WindowSpec",
        test=f"{INVARIANCE}::test_hits_land_on_128_tokens",
    ),
    Duty(
        id="prefix-replay",
        instead_of="KVCacheManager.get_computed_blocks",
        what="In rings: set a prefix hit back by as many tokens as fill them, and no block of any group with it.",
        hook="vllm.v1.kv_cache_interface:KVCacheSpec.prefix_replay_tokens",
        used="atom_vllm_bridge.kv_cache:RingSpec.prefix_replay_tokens",
        test=f"{RINGS}::test_a_hit_is_rolled_back_and_gives_what_a_cold_run_gives",
    ),
    Duty(
        id="replayed-tokens",
        instead_of="CommonAttentionMetadata, GPUModelRunner._build_attention_metadata",
        what="Keep replayed tokens from being written into blocks that other requests read.",
        hook=f"{MODEL_STATE}.prepare_attn",
        used="atom_vllm_bridge.model_state:AtomModelState.prepare_attn",
        test=f"{RINGS}::test_a_replay_leaves_the_shared_pages_as_they_are",
    ),
    Duty(
        id="ring-slots",
        instead_of="a table of slots by request id; BlockPool.free_blocks",
        what="Give each request a ring, and take it back: it is the one block of its group.",
        hook="vllm.v1.kv_cache_interface:CircularBufferSpec",
        used="atom_vllm_bridge.kv_cache:RingSpec",
        test=f"{RINGS}::test_company_and_more_requests_than_slots_change_nothing",
    ),
    Duty(
        id="prefix-boundary",
        instead_of="KVCacheManager.get_computed_blocks",
        what="Leave the state that is empty at the end of every hit out of the prefix cache.",
        hook="vllm.v1.kv_cache_interface:KVCacheSpec.prefix_cacheable",
        used="atom_vllm_bridge.kv_cache:HeavyCompressorSpec.prefix_cacheable",
        test="tests/plugin/test_kv_cache.py::test_hits_are_found_on_128_tokens",
    ),
    Duty(
        id="block-sizes",
        instead_of="kv_cache_utils.get_kv_cache_groups, unify_kv_cache_spec_page_size",
        what="Keep the block size of each cache group though their pages differ in size.",
        hook=f"{BACKEND}.supported_kv_cache_layouts",
        used="atom_vllm_bridge.attention.backend:AtomBackend.supported_kv_cache_layouts",
        test="tests/plugin/test_kv_cache.py::test_blocks_are_outermost_so_that_small_groups_keep_their_block_size",
    ),
    Duty(
        id="request-life-cycle",
        instead_of="GPUModelRunner.add_requests, GPUModelRunner.finish_requests",
        what="Learn which requests come and go on a worker.",
        hook=f"{MODEL_STATE}.add_request",
        used="atom_vllm_bridge.model_state:AtomModelState.add_request",
        test="tests/plugin/test_metrics.py::test_a_request_in_an_engine_is_counted_with_its_hit",
    ),
    Duty(
        id="request-ids-for-builders",
        instead_of="GPUModelRunner._build_attention_metadata, propose_draft_token_ids",
        what="Tell requests apart in attention metadata, without ids: by the rows of each group's block table.",
        hook=f"{BUILDER}.build",
        used="atom_vllm_bridge.attention.backend:AtomMetadataBuilder.build",
        test=f"{INVARIANCE}::test_more_requests_over_time_than_slots",
    ),
    Duty(
        id="graph-mode",
        instead_of="RocmPlatform.check_and_update_config",
        what="Turn the graph mode that was asked for into the one that the model honours.",
        hook="vllm.config.compilation:CUDAGraphMode.without_piecewise",
        used="atom_vllm_bridge.platforms.base:AtomPlatform.graph_mode",
        test="tests/plugin/test_published_commands.py::test_the_start_says_what_each_flag_became",
    ),
    Duty(
        id="graph-memory",
        instead_of="GPUModelRunner.profile_cudagraph_memory",
        what=(
            "On AMD GPUs with aiter's collectives, capture no graphs only to measure their "
            "memory."
        ),
        hook="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        used="atom_vllm_bridge.workers.rocm:AtomRocmWorker.determine_available_memory",
        test=f"{ROCM}::test_graphs_are_not_captured_for_measurement_with_aiters_collectives",
    ),
    Duty(
        id="classes-kept",
        instead_of="ModelRegistry.register_model",
        what=(
            "Keep the bridge's classes where another plugin registers DeepSeek-V4 after it."
        ),
        hook=f"{PLATFORM}.pre_register_and_update",
        used="atom_vllm_bridge.plugin:register_classes",
        test=f"{ROCM}::test_the_platform_is_atoms_and_deepseek_v4_the_bridges_in_either_order",
    ),
    Duty(
        id="configuration",
        instead_of="VllmConfig.__post_init__",
        what="Refuse what cannot be honoured, and complete the rest, before anything starts.",
        hook=f"{PLATFORM}.check_and_update_config",
        used="atom_vllm_bridge.platforms.base:AtomPlatform.check_and_update_config",
        test="tests/plugin/test_platform.py::test_what_cannot_be_honoured_is_refused_in_one_line",
    ),
    Duty(
        id="engine-kernels",
        instead_of="the Triton kernels of Model Runner V2",
        what="Run the runner's kernels where Triton has no compiler.",
        hook=f"{PLATFORM}.register_triton_kernel_overrides",
        used="atom_vllm_bridge.platforms.cpu:AtomCpuPlatform.register_triton_kernel_overrides",
        test="tests/plugin/engine_kernels/test_registration.py::test_vllm_launches_the_stand_ins",
    ),
    Duty(
        id="aux-hidden-states",
        instead_of="the isinstance checks for SupportsEagle3",
        what="Let the runner choose the layers whose hidden states a draft reads.",
        hook="vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers",
        used="atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM.set_aux_hidden_state_layers",
        test=f"{IN_ENGINE}::test_taps_are_the_layers_of_the_config_plus_one",
    ),
    Duty(
        id="mtp-hidden-states",
        instead_of="SpecDecodeBaseProposer.set_inputs_first_pass",
        what="Hand an MTP draft the residual streams, which are wider than hidden states.",
        hook="vllm.v1.worker.gpu.spec_decode.utils:get_drafter_hidden_states",
        used="atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM.get_mtp_target_hidden_states",
        test="tests/plugin/test_no_host_copies.py::test_the_targets_streams_for_an_mtp_draft_stay",
    ),
    Duty(
        id="shared-embedding-and-head",
        instead_of="SpecDecodeBaseProposer.load_model",
        what="Give the draft the target's embedding and output head.",
        hook="vllm.v1.worker.gpu.spec_decode.dspark.utils:load_dspark_model",
        used="atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM.lm_head",
        test=f"{IN_ENGINE}::test_embedding_and_head_are_the_targets_own",
    ),
    Duty(
        id="draft-kv-group",
        instead_of="validate_same_kv_cache_group, initialize_attn_backend, get_kv_cache_groups",
        what="Register the draft's caches as a group of their own beside the target's.",
        hook=f"{DFLASH}.set_attn",
        used="atom_vllm_bridge.dspark:AtomDSparkDraftModel.get_draft_kv_cache_layer_names",
        test=f"{DRAFT_KV}::test_vllm_takes_exactly_the_stages_for_the_drafts",
    ),
    Duty(
        id="draft-hits",
        instead_of="KVCacheCoordinator.find_longest_cache_hit",
        what="Make a prefix hit as long with a DSpark draft as without.",
        hook="vllm.config.speculative:SpeculativeConfig.disable_eagle_block_drop",
        used="atom_vllm_bridge.platforms.base:AtomPlatform._check_and_update_deepseek_v4",
        test=f"{DRAFT_KV}::test_a_hit_is_as_long_with_the_draft_as_without",
    ),
    Duty(
        id="draft-metadata",
        instead_of="SpecDecodeBaseProposer.__init__ (allowed_attn_types), build_per_group_and_layer_attn_metadata",
        what="Draft with the model's own attention metadata, within captured graphs too.",
        hook=f"{BUILDER}.update_draft_decode_metadata",
        used="atom_vllm_bridge.attention.backend:AtomMetadataBuilder.update_draft_decode_metadata",
        test="tests/plugin/test_no_host_copies.py::test_a_graph_of_a_dspark_draft_holds_context_and_block",
    ),
    Duty(
        id="async-staging",
        instead_of="the pinned buffers of GPUModelRunner",
        what="Never overwrite a staging buffer that a step in flight still reads: vLLM's pools are the only ones.",
        hook="vllm.v1.worker.gpu.buffer_utils:UvaBufferPool",
        used="atom_vllm_bridge.attention.backend:AtomMetadataBuilder.build",
        test=f"{ASYNC}::test_vllms_pools_are_as_deep_as_the_batches_in_flight",
    ),
    Duty(
        id="async-placeholders",
        instead_of="the input preparation of GPUModelRunner",
        what="Read the id −1, which stands for a token that is not known yet, as token 0.",
        hook="vllm.model_executor.models.interfaces_base:VllmModel.embed_input_ids",
        used="atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM.embed_input_ids",
        test=f"{ASYNC}::test_a_placeholder_is_read_as_token_0",
    ),
    Duty(
        id="dummy-batches",
        instead_of="GPUModelRunner._dummy_run",
        what="Let an idle data-parallel rank run along without writing state: its slots are all −1.",
        hook="vllm.v1.attention.backends.utils:PAD_SLOT_ID",
        used="atom_vllm_bridge.step:with_caches",
        test=f"{ASYNC}::test_an_idle_ranks_batch_leaves_caches_and_live_requests_alone",
    ),
    Duty(
        id="expert-exchange",
        instead_of="CpuCommunicator",
        what="On a CPU, gather the tokens of data-parallel ranks that share experts, of which each may have another number.",
        hook=f"{PLATFORM}.get_device_communicator_cls",
        used="atom_vllm_bridge.platforms.communicator:AtomCpuCommunicator",
        test="tests/plugin/test_parallel_ranks.py::test_data_parallel_ranks_give_the_text_of_one",
    ),
]

for duty in DUTIES:
    PATCHES.add(duty)
