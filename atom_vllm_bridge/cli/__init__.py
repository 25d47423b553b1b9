"""The command `atom-vllm-bridge`."""

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer


def main() -> None:
    """Run the command line. Nothing is imported before it is needed: `doctor` must work where much else does not."""
    if sys.argv[1:2] == ["doctor"]:
        from atom_vllm_bridge.cli import doctor

        sys.exit(doctor.main(sys.argv[2:]))

    # As an interrupt does, and unlike SIGTERM by itself: servers that a measurement started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    application()(prog_name="atom-vllm-bridge")


def application() -> "Typer":
    """The commands with their options; `doctor` parses its own."""
    import typer

    from atom_vllm_bridge.cli.bench import bench
    from atom_vllm_bridge.cli.checkpoint import checkpoint_app
    from atom_vllm_bridge.cli.eval import evaluate

    app = typer.Typer(
        help="Tools beside `vllm serve`: what is installed and chosen, checkpoints to try it with, and measurements.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.add_typer(checkpoint_app, name="checkpoint")
    app.command(name="eval")(evaluate)
    app.command(name="bench")(bench)

    @app.command(name="doctor", add_help_option=False)
    def _doctor() -> None:
        """Report what is installed and chosen; exit code 1 if something is wrong."""

    return app
