"""`python -m atom_vllm_bridge.cli.doctor`, where the command is not installed."""

import sys

from atom_vllm_bridge.cli.doctor import main

sys.exit(main(sys.argv[1:]))
