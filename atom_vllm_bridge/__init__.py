"""ATOM-style native DeepSeek-V4 for vLLM. Importing this package loads neither torch nor vLLM."""
