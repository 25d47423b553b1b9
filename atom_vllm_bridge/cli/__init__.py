"""The command `atom-vllm-bridge`."""

import sys


def main() -> None:
    """Run the command line. Nothing is imported before it is needed: `doctor` must work where much else does not."""
    if sys.argv[1:2] == ["doctor"]:
        from atom_vllm_bridge.cli import doctor

        sys.exit(doctor.main(sys.argv[2:]))

    import typer

    from atom_vllm_bridge.cli.checkpoint import checkpoint_app

    app = typer.Typer(
        help="Tools beside `vllm serve`: what is installed and chosen, and checkpoints to try it with.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.add_typer(checkpoint_app, name="checkpoint")

    @app.command(name="doctor", add_help_option=False)
    def _doctor() -> None:
        """Report what is installed and chosen; exit code 1 if something is wrong."""

    app(prog_name="atom-vllm-bridge")
