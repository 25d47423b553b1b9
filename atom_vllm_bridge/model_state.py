"""The life of requests on the worker, as vLLM's Model Runner V2 tells it to a model.

With paged state nothing is kept for a request outside its blocks, so that all of vLLM's defaults hold; the class is ours so
that only Model Runner V2 can run the model, and so that what the model cannot take is refused.
"""

from typing import ClassVar

from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class AtomModelState(DefaultModelState):
    """Token ids in; the hash layers route by id, so prompt embeddings are refused by vLLM's own check."""

    supports_prompt_embeds: ClassVar[bool] = False
