"""README's table of the vLLM releases that were tried, from `verified_vllm.csv`: `python -m contracts.matrix` writes it."""

import csv
from pathlib import Path

from tabulate import tabulate

from contracts.record import ROOT

CSV = ROOT / "verified_vllm.csv"
README = ROOT / "README.md"
BEGIN = "<!-- from verified_vllm.csv; make docs writes it -->"
END = "<!-- end -->"


def rows() -> list[dict[str, str]]:
    """One a release and build, as the file has them."""
    with CSV.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def with_matrix(text: str) -> str:
    """`text` with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = tabulate(rows(), headers="keys", tablefmt="github", disable_numparse=True)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(readme: Path = README) -> None:
    readme.write_text(with_matrix(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
