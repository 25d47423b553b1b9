"""What a served model gets right, and how fast: accuracy and speed, measured through vLLM's own server."""
