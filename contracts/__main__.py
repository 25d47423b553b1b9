"""`python -m contracts [WHERE] [--record]`: what our code needs of vLLM, held against the sources at WHERE.

Prints a line for each thing that is missing or different; exit code 1 if there is one.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from contracts.record import FOLDER, Recorder, as_text, faults, kept, lost, version_of
from contracts.sources import Sources


def installed() -> Path:
    """The folder that holds the installed vLLM, which is not imported.

    Raises:
        FileNotFoundError: there is none.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("vLLM is not installed. Give a wheel.")
    return Path(spec.origin).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m contracts", description=__doc__)
    parser.add_argument(
        "where",
        nargs="?",
        type=Path,
        help="a wheel, or a folder that holds the folder vllm; default: the installed one",
    )
    parser.add_argument(
        "--record", action="store_true", help="keep the answers in contracts/"
    )
    options = parser.parse_args()
    try:
        sources = Sources(options.where or installed())
    except FileNotFoundError as error:
        parser.error(str(error))
    version, recorder = version_of(sources), Recorder(sources.ask)
    found = faults(recorder)
    for release in kept():
        if Version(release.version) < Version(version):
            found += lost(recorder.answers, release.answers)
    for fault in found:
        print(fault)
    print(f"vLLM {version}: {len(recorder.answers)} questions, {len(found)} faults.")
    if options.record:
        file = FOLDER / f"vllm-{version}.json"
        file.write_text(as_text(version, recorder.answers))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
