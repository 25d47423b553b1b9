"""Random DeepSeek-V4 checkpoints in the published layouts, for tests and first steps."""
