"""`loka plan show|diff|make`: read plans, compare them, make one before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer
from rich.console import Console

from loka_compile.commands.mods_flags import Keep
from loka_compile.commands.mods_flags import Mods
from loka_compile.commands.mods_flags import options_of

if TYPE_CHECKING:
    from loka_compile.plan import Plan

app = typer.Typer(no_args_is_help=True, help="Read, compare and make plans.")

File = Annotated[Path, typer.Argument(help="A plan that was saved before.")]


@app.command()
def show(file: File) -> None:
    """Print a saved plan: every site, its kernels, and why."""
    from loka_compile.cli import one_line_errors
    from loka_compile.plan import Plan

    with one_line_errors():
        _show(Plan.load(file))


@app.command()
def diff(a: File, b: File) -> None:
    """Print what B decides otherwise than A; exit code 1 when there is anything."""
    from loka_compile.cli import one_line_errors
    from loka_compile.plan import Plan
    from loka_compile.plan_diff import diff as differences

    with one_line_errors():
        lines = list(differences(Plan.load(a), Plan.load(b)))
    typer.echo("\n".join(lines) if lines else "the same decisions")
    if lines:
        raise typer.Exit(1)


@app.command()
def make(
    model: Annotated[
        str, typer.Option(help="A model of the zoo, NAME or NAME:SCALE (wukong:base).")
    ] = "wukong",
    scale: Annotated[
        str | None, typer.Option(help="Of the model, where NAME has none. [default: tiny]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    mods: Mods = None,
    keep: Keep = None,
    emulate: Annotated[bool, typer.Option(help="Decide by accuracy alone, in software.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print only; write nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Where to save the plan.")] = Path("plan.json"),
) -> None:
    """Plan a model of the zoo on random data, and print what the plan is predicted to gain.

    For a model of your own: loka_compile.make_plan(model, inputs).
    """
    from loka_compile.cli import one_line_errors

    with one_line_errors():
        options = {"mods": "on", "emulate": emulate, **options_of(mods, keep)}
        import torch

        from loka_compile.dry_run import make_plan
        from loka_compile.dry_run import measure_step
        from loka_compile.model_sites import zoo_model
        from loka_compile.train.compare import CompareConfig

        name, _, own = model.partition(":")
        if own and scale not in (None, own):
            raise typer.BadParameter(f"--model says the scale {own}, --scale says {scale}")
        scale = own or scale or "tiny"
        where: torch.device = CompareConfig(scale=scale, device=device).torch_device()
        try:
            dense, inputs_of = zoo_model(f"{name}:{scale}", where)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        dense = dense.to(torch.bfloat16)
        inputs = [t if t.dtype == torch.bool else t.bfloat16() for t in inputs_of(batch)]
        inputs[0].requires_grad_()
        plan = make_plan(dense, inputs, options=options)
        # On a CPU nothing has a price, so that there is no gain to set it against.
        step = measure_step(dense, inputs, options=options) if where.type == "cuda" else None
        _show(plan, step)
        if not dry_run:
            typer.echo(f"plan: {plan.save(out)}")


def _show(plan: Plan, step_us: float | None = None) -> None:
    from loka_compile.dry_run import predict
    from loka_compile.mod_set import ModSet
    from loka_compile.mod_set import pairs_of
    from loka_compile.report.tables import site_table

    console = Console()
    console.print(site_table(plan.to_dict()["sites"]))
    mods = ModSet.of(plan.mods, pairs_of(plan.kept))
    console.print(f"Mods: {mods.text(99)}", markup=False)
    if plan.predicted_nats is not None:
        replayed = "" if plan.replayed_nats is None else f"; replayed {plan.replayed_nats:.2g}"
        console.print(f"predicted loss: {plan.predicted_nats:.2g} nats per sample{replayed}")
    predicted = predict(plan, step_us)
    if predicted.speedup is None:
        console.print("no direction has a price here: no gain can be predicted")
        return
    console.print(
        f"priced GEMMs: {predicted.high_us:.1f} us per step in high precision, "
        f"{predicted.planned_us:.1f} us as planned ({predicted.speedup:.2f}x); "
        f"{predicted.unpriced} directions have no price"
    )
    for name, direction, kernel, high, planned in predicted.rows[:8]:
        share = f"{planned / predicted.planned_us:>4.0%}"
        console.print(f"  {share}  {name} {direction}: {kernel}, {planned:.1f} of {high:.1f} us")
    if predicted.step_us is not None and predicted.planned_step_us is not None:
        console.print(
            f"whole step: {predicted.step_us / 1e3:.2f} ms in high precision, measured; "
            f"{predicted.planned_step_us / 1e3:.2f} ms predicted as planned "
            f"({predicted.step_us / predicted.planned_step_us:.2f}x)"
        )
