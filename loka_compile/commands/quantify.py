"""``loka quantify``: errors of every kernel at the sites of a saved Probe state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quantify(
    state: Annotated[
        Path, typer.Argument(help="A probe-*.safetensors file, or the probe_dir of a run.")
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint (.safetensors); without it weights are drawn from their recorded RMS."
        ),
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Comma-separated, e.g. torch:rowwise; all when left out.")
    ] = None,
    sites: Annotated[str | None, typer.Option(help="Comma-separated site names.")] = None,
    models: Annotated[
        str,
        typer.Option(help="Distribution models: reservoir, gaussian, diagonal, standard_normal."),
    ] = "reservoir,gaussian,diagonal,standard_normal",
    weight_model: Annotated[
        str,
        typer.Option(
            help="actual, or matrix_normal: draw weights from what a run with "
            "probe_weight_model='matrix_normal' has learnt."
        ),
    ] = "actual",
    samples: Annotated[int, typer.Option(help="Samples per site; the paper takes 50.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Write the result here.")] = Path("quantify.json"),
    plots: Annotated[
        Path | None, typer.Option(help="Folder for one picture per site (needs matplotlib).")
    ] = None,
) -> None:
    """Measure every kernel at every site of a saved Probe state, per distribution model.

    Rows of real data are in the state only if the run asked for them (probe_rows_on_disk); without
    them the diagonal and standard normal models remain. Kernels that do not run on this device are
    emulated.
    """
    from loka_compile.cli import one_line_errors

    with one_line_errors():
        from safetensors.torch import load_file

        from loka_compile.probe import offline
        from loka_compile.probe import saver
        from loka_compile.probe import store

        loaded = (
            saver.load_folder(state) if state.is_dir() else store.load_all(state, device=device)
        )
        values = load_file(weights, device=device) if weights is not None else None
        found = offline.quantify(
            values,
            loaded,
            sites=_split(sites),
            kernels=_split(kernels),
            models=_split(models) or (),
            samples=samples,
            weight_model=weight_model,
        )
        found.save(out)
        typer.echo(found.table(), nl=False)
        typer.echo(f"result: {out}")
        if plots is not None:
            from loka_compile.probe import plots as drawing

            for path in drawing.save_all(loaded.statistics, found, plots, values):
                typer.echo(f"plot: {path}")


def _split(text: str | None) -> tuple[str, ...] | None:
    return tuple(t.strip() for t in text.split(",") if t.strip()) if text else None
