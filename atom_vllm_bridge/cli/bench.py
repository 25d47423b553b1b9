"""`atom-vllm-bridge bench`: how fast a checkpoint is served, and whether its drafts pay."""

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

# What `vllm bench serve` reads prompts with, and the plot is drawn with.
NEEDED = ("pandas", "matplotlib", "prometheus_client")


def bench(
    model: Annotated[str, typer.Argument(help="Checkpoint, with DSpark stages.")],
    serve_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SERVE_FLAGS", help="Options of `vllm serve`, after `--`."
        ),
    ] = None,
    preset: Annotated[
        Literal["frozen", "random-512-1024", "speed"],
        typer.Option(help="What is asked: prose and problems, or a published method."),
    ] = "frozen",
    arms: Annotated[
        str,
        typer.Option(help="Of off, dspark, dspark-7, adaptive-7 and mtp, with commas."),
    ] = "off,dspark,mtp",
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at once, with commas: 1,4,16.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests at each point.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of an answer.")
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="K of the arm dspark; as trained unless given."),
    ] = None,
    mtp_model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The same target with an MTP stage."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for tables, plot, logs and raw results.")
    ] = Path("build/bench"),
) -> None:
    """Compare tokens a second without a draft, with DSpark and with MTP; a cold server for every point."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _stop(
            f"not installed: {', '.join(missing)}. Run: pip install 'atom-vllm-bridge[bench]'"
        )
    from tqdm import tqdm

    from atom_vllm_bridge.measure.server import ServerError
    from atom_vllm_bridge.measure.speed import ARMS, BenchError, arms_of, measure
    from atom_vllm_bridge.measure.speed_report import Report, write_report
    from atom_vllm_bridge.measure.workload import WorkloadError, workload_of

    flags = serve_flags or []
    if any(flag.startswith("--speculative-config") for flag in flags):
        _stop(
            "--speculative-config is what the arms differ in; choose with --arms and --draft-tokens"
        )
    chosen = [name.strip() for name in arms.split(",")]
    unknown = [name for name in chosen if name not in ARMS]
    if unknown:
        _stop(f"--arms {arms}: {unknown[0]!r} is none of {', '.join(ARMS)}")
    try:
        workload = workload_of(
            preset,
            concurrency=_numbers(concurrency),
            num_prompts=num_prompts,
            output_len=output_len,
        )
        compared, notes = arms_of(chosen, model, mtp_model, draft_tokens)
        report = Report(
            model=model,
            preset=preset,
            asked=workload.asked,
            serve_flags=flags,
            fit_for_acceptance=workload.fit_for_acceptance,
            differs=workload.differs,
            notes=notes + workload.caveats(),
            versions={name: version(name) for name in ("vllm", "atom-vllm-bridge")},
        )
        measured = measure(compared, workload, out / "raw", serve_flags=flags)
        total = len(compared) * len(workload.concurrency)
        for point in tqdm(measured, "points", total, unit="point"):
            tqdm.write(
                f"{ARMS[point.arm]} at {point.concurrency}: {point.output_tokens_per_s:.1f} output tokens/s",
                sys.stderr,
            )
            report.points.append(point)
            write_report(report, out)
    except (BenchError, ServerError, WorkloadError) as error:
        _stop(str(error))
    typer.echo(report.markdown())
    typer.echo(f"{out}: bench.md, bench.json, bench.png", err=True)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        _stop(f"--concurrency {text}: whole numbers with commas, as in 1,4,16")
    return numbers


def _stop(why: str) -> None:
    typer.echo(f"atom-vllm-bridge: {why}", err=True)
    raise typer.Exit(1)
