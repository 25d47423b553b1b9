"""`atom-vllm-bridge eval`: accuracy with and without speculation, and acceptance, of a served model."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from atom_vllm_bridge.measure.accuracy import Arm, Outcome, Task
    from atom_vllm_bridge.measure.server import LiveServer

AS_SERVED = "as-served"

# Options that mean something only of a checkpoint or a URL, of a catalog, and of servers that are started here.
OF_A_MODEL = (
    *("serve_flags", "num_fewshot", "limit", "arms", "mtp_model", "shots", "data"),
    *("concurrency", "max_model_len"),
)
OF_A_CATALOG = ("case", "where")
OF_A_SERVER = ("serve_flags", "arms", "mtp_model", "max_model_len")


def evaluate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL_OR_URL]",
            help="A checkpoint, served once an arm; or the URL of a server, which is one arm.",
        ),
    ] = None,
    serve_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="For each `vllm serve`."),
    ] = None,
    num_fewshot: Annotated[
        int, typer.Option(min=0, help="Worked examples before each question.")
    ] = 8,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="So many of the first questions; all unless given."),
    ] = None,
    arms: Annotated[
        str,
        typer.Option(help="Of these, in this order, the first is compared with."),
    ] = "off,dspark-5,dspark-7,adaptive-7,dspark-t1,mtp",
    mtp_model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of the arm mtp: the same model with an MTP stage."
        ),
    ] = None,
    shots: Annotated[
        Literal["as-is", "renumbered"],
        typer.Option(help="Worked examples as they are, or with other numbers."),
    ] = "as-is",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with questions of your own: schoolbook_test.jsonl, schoolbook_shots.jsonl."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    max_model_len: Annotated[
        int,
        typer.Option(help="Of the servers: the longest prompt and its answer, tokens."),
    ] = 4096,
    catalog: Annotated[
        Path | None,
        typer.Option(help="Run the cases of this file instead, against their bars."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Of the catalog: this case. May be given several times."),
    ] = None,
    where: Annotated[
        str, typer.Option(help="Of the catalog, without --case: the cases for it.")
    ] = "cpu",
    out: Annotated[
        Path, typer.Option(help="Folder for tables, answers and servers' logs.")
    ] = Path("build/eval"),
) -> None:
    """Ask a served model word problems, with and without speculation.

    Exit code 1 if a server failed, a check between arms does not hold, or a case of the catalog misses a bar.
    """
    _require_lm_eval()
    from atom_vllm_bridge.measure.accuracy import Task
    from atom_vllm_bridge.measure.server import ServerError

    out.mkdir(parents=True, exist_ok=True)
    if (model is None) == (catalog is None):
        raise typer.BadParameter("name either MODEL_OR_URL or --catalog FILE.")
    if catalog is not None:
        _refuse_given(context, OF_A_MODEL, "a case of the catalog says it")
    else:
        _refuse_given(context, OF_A_CATALOG, "there is no --catalog")
    try:
        if catalog is not None:
            good = _run_catalog(catalog, case or [], where, out)
        else:
            assert model is not None
            name = "schoolbook" if shots == "as-is" else "schoolbook_renumbered"
            task = Task(name, num_fewshot, limit, data, concurrency)
            if _is_url(model):
                _refuse_given(context, OF_A_SERVER, f"{model} runs already")
            if "--speculative-config" in (serve_flags or []):
                _refuse(
                    "--speculative-config is each arm's own. Leave it out, and name arms: --arms off,dspark-5."
                )
            flags = ["--max-model-len", str(max_model_len), *(serve_flags or [])]
            chosen = [arm.strip() for arm in arms.split(",")]
            good = _run_arms(model, mtp_model, flags, chosen, task, out)
    # A server, a catalog, a task or its data; what they raise says what to do.
    except (ServerError, ValueError, OSError) as error:
        _refuse(str(error))
    raise typer.Exit(0 if good else 1)


def _run_arms(
    model: str,
    mtp_model: Path | None,
    flags: list[str],
    names: list[str],
    task: "Task",
    out: Path,
) -> bool:
    """Measure and write one arm after another, and print all; whether every check holds."""
    from atom_vllm_bridge.measure.accuracy import ARMS, Arm, checks, measure, save
    from atom_vllm_bridge.measure.tasks import FOLDER, QUESTIONS

    questions = (task.folder or FOLDER) / QUESTIONS
    if not questions.is_file():  # said before a server is started for nothing
        _refuse(f"{questions} is not there. Name the folder with it: --data DIR.")
    live = _is_url(model)
    if unknown := [name for name in names if name not in ARMS]:
        _refuse(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}.")
    chosen = {AS_SERVED: Arm()} if live else {name: ARMS[name] for name in names}
    notes, outcomes = [], []
    if mtp_model is None and "mtp" in chosen:
        del chosen["mtp"]
        notes.append(
            "mtp is left out: MTP and DSpark drafts are in different checkpoints. Name the one with MTP: --mtp-model DIR."
        )
    if not chosen:
        _refuse(" ".join(notes))
    for name, arm in chosen.items():
        path = str(mtp_model) if arm.draft == "mtp" else model
        typer.echo(f"{name}: {path}", err=True)
        with _server(path, name, arm, flags, out) as server:
            speculates = None if live else arm.draft is not None
            outcome = measure(server, task, name, arm.temperature, speculates)
        save(outcome, out)
        outcomes.append(outcome)
        # After each arm, so that what was measured stands even if a later one fails.
        report: dict[str, Any] = {
            "model": model,
            "mtp_model": mtp_model and str(mtp_model),
            "serve_flags": flags,
            "task": asdict(task),
            "arms": [outcome.as_dict() for outcome in outcomes],
            "checks": [asdict(check) for check in checks(outcomes)],
            "notes": notes,
        }
        _write(out, report, _page(task, outcomes, notes))
    typer.echo(_page(task, outcomes, notes))
    return all(check.holds for check in checks(outcomes))


def _page(task: "Task", outcomes: "list[Outcome]", notes: list[str]) -> str:
    from atom_vllm_bridge.measure.accuracy import checks, table

    asked = f"{task.name}; worked examples: {task.num_fewshot}; questions: {len(outcomes[0].answers)}"
    lines = [asked, "", table(outcomes), ""]
    lines += [
        f"- {'holds' if c.holds else 'FAILS'}: {c.what}" for c in checks(outcomes)
    ]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines)


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _server(
    model: str, name: str, arm: "Arm", flags: list[str], out: Path
) -> "AbstractContextManager[LiveServer]":
    from atom_vllm_bridge.measure.server import LiveServer, Server

    if name == AS_SERVED:
        return LiveServer(model)
    # The last of two equal flags counts, so that the caller's stand after the arm's.
    return Server(model, [*arm.flags, *flags], log=out / f"{name}.log")


def _run_catalog(path: Path, ids: list[str], where: str, out: Path) -> bool:
    """Run cases, print and write what became of each; whether all that ran passed."""
    from atom_vllm_bridge.measure import catalog
    from atom_vllm_bridge.measure.accuracy import save

    cases = catalog.read(path)
    wanted = catalog.chosen(cases, ids, where)
    if not wanted:
        _refuse(f"no case of {path} is for {where}.")
    results = catalog.run(wanted, out, lambda line: typer.echo(line, err=True))
    done = [result.outcome for result in results if result.outcome is not None]
    for outcome in done:
        save(outcome, out)
    text = catalog.table(cases, results)
    typer.echo(text)
    report: dict[str, Any] = {
        "catalog": str(path),
        "passed": {result.case.id: result.passed for result in results},
        "cases": [outcome.as_dict() for outcome in done],
    }
    _write(out, report, text)
    return all(result.passed for result in results)


def _write(out: Path, report: dict[str, Any], text: str) -> None:
    (out / "results.json").write_text(
        json.dumps(report, indent=2, default=str, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    (out / "table.md").write_text(text + "\n", encoding="utf-8")


def _refuse_given(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Options that would change nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "what stands after --" if name == "serve_flags" else _option(name)
            _refuse(f"{option} is not taken here: {why}. Leave it out.")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require_lm_eval() -> None:
    from importlib.util import find_spec

    if missing := [
        name
        for name in ("lm_eval", "tenacity", "aiohttp", "jsonschema")
        if not find_spec(name)
    ]:
        _refuse(
            f"not installed: {', '.join(missing)}. Run: pip install 'atom-vllm-bridge[eval]'"
        )


def _refuse(why: str) -> NoReturn:
    typer.echo(f"atom-vllm-bridge: {why}", err=True)
    raise typer.Exit(1)
