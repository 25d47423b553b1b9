"""Thin subclasses of vLLM's own platforms, one file each: importing vLLM's ROCm platform needs ROCm, and so on."""
