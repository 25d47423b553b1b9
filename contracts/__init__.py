"""What the bridge asks of vLLM, held against a vLLM's sources: `python -m contracts WHEEL`.

`uses` walks our code for what it takes from vLLM, `table` adds by hand what no walk can see, `sources` answers from a wheel or
a folder without importing it, and `vllm-*.json` keep those answers, so that tests need no wheel.
"""
