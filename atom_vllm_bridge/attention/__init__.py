"""The attention backend that vLLM sees: it lays out caches and hands over one batch; the mathematics is the model's."""

from atom_vllm_bridge.attention.backend import AtomBackend, AtomMetadata

__all__ = ["AtomBackend", "AtomMetadata"]
