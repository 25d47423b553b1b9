"""Tasks of lm-eval's: word problems in gsm8k's form, from the files in this folder.

lm_eval --include_path atom_vllm_bridge/measure/tasks --tasks schoolbook …
"""

from pathlib import Path

FOLDER = Path(__file__).parent
QUESTIONS = "schoolbook_test.jsonl"
