"""`atom-vllm-bridge checkpoint`: make a checkpoint to serve or to test with."""

import importlib.util
import time
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

# Of the host's packages, what values are made and tokens counted with.
NEEDED = ("torch", "tokenizers")

checkpoint_app = typer.Typer(
    no_args_is_help=True, help="Small DeepSeek-V4 checkpoints."
)


@checkpoint_app.callback()
def checkpoint() -> None:
    """Small DeepSeek-V4 checkpoints, random or trained, in the published layouts."""


@checkpoint_app.command()
def make(
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    preset: Annotated[
        Literal["tiny", "agreeing", "schoolbook", "flash-shaped"],
        typer.Option(
            help="Random and small; the same, with a draft that is often accepted; "
            "trained, answers word problems; or random, of DeepSeek-V4-Flash's own "
            "dimensions."
        ),
    ] = "tiny",
    layout: Annotated[
        Literal["bf16", "mxfp4", "fp8"],
        typer.Option(help="As published: unquantised, Flash, or Flash-Base."),
    ] = "mxfp4",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Depth; 6 unless given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same values.")] = 0,
    draft: Annotated[
        Literal["dspark", "mtp", "none"],
        typer.Option(help="Three DSpark stages, one MTP stage, or no draft."),
    ] = "dspark",
    like: Annotated[
        Literal["mxfp4", "fp8"] | None,
        typer.Option(help="With bf16: whose dequantised values to hold."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
) -> None:
    """Write a checkpoint with DeepSeek-V4's own tensor names and dtypes."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        _refuse(
            f"not installed: {', '.join(missing)}. vLLM brings them: install it beside the plugin, as the README says"
        )
    from atom_vllm_bridge.checkpoint.make import make as make_checkpoint

    start = time.perf_counter()
    try:
        make_checkpoint(
            out,
            preset,
            layout,
            layers,
            seed,
            draft,
            like=like,
            overwrite=overwrite,
            progress=True,
        )
    except (ValueError, OSError) as error:
        _refuse(str(error))
    size = sum(file.stat().st_size for file in out.iterdir())
    seconds = time.perf_counter() - start
    typer.echo(f"{out}: {preset}, {layout}, {size / 2**20:.0f} MiB in {seconds:.1f} s")


def _refuse(why: str) -> NoReturn:
    typer.echo(f"atom-vllm-bridge: {why}", err=True)
    raise typer.Exit(1)
