"""`loka bench`: the cost table, shown, exported, imported, and filled on a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from loka_compile.lowering.cost_table import CostRow


def bench(
    shapes: Annotated[
        Path | None, typer.Option(help="JSON: a list of [M, K, N], or a saved report.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Stop when this much time is spent.")] = 600.0,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Rows: an export, or the GEMM benchmark's JSON.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write rows as JSON here.")] = None,
    tiles: Annotated[
        bool, typer.Option(help="With SHAPES: tune our own kernel's tiles there, and keep them.")
    ] = False,
    imported_only: Annotated[
        bool, typer.Option(help="With --export: only the rows of --import, not the table's.")
    ] = False,
) -> None:
    """Show the cost table, or fill it: times every kernel at SHAPES; what has a row is skipped."""
    from loka_compile.cli import one_line_errors

    with one_line_errors():
        from loka_compile.lowering import cost_table
        from loka_compile.lowering.cost_store import Store
        from loka_compile.lowering.cost_store import default_path
        from loka_compile.lowering.cost_store import default_table

        store = Store(default_path())
        store.rows()  # A damaged table is an error here.
        imported = [] if import_ is None else _imported(import_)
        if imported and not imported_only:
            default_table().put(imported)
        if shapes is not None:
            (_tune if tiles else _fill)(shapes, seconds)
        rows = imported if imported_only else default_table().rows()
        if export is not None:
            typer.echo(f"{len(rows)} rows: {cost_table.export_rows(rows, export)}")
        if shapes is None and export is None:
            _show(rows, store.path)


def _imported(path: Path) -> list[CostRow]:
    from loka_compile.lowering.cost_import import rows_of_benchmark
    from loka_compile.lowering.cost_table import KIND
    from loka_compile.lowering.cost_table import import_rows

    if path.exists() and f'"kind": "{KIND}"' not in path.read_text(errors="replace")[:200]:
        return rows_of_benchmark(path)
    return list(import_rows(path))


def _shapes(path: Path) -> list[tuple[int, int, int]]:
    from loka_compile.errors import CostTableError

    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict):
            return [(s["M"], s["K"], s["N"]) for s in data["sites"]]
        return [(int(m), int(k), int(n)) for m, k, n in data]
    except (ValueError, KeyError, TypeError) as error:
        raise CostTableError(path, f"no list of [M, K, N] and no report ({error})") from error


def _fill(path: Path, seconds: float) -> None:
    import torch
    from rich.progress import Progress

    from loka_compile.lowering.libraries.base import GemmShape
    from loka_compile.lowering.measure import Place
    from loka_compile.lowering.measure import price
    from loka_compile.lowering.recipes import DIRECTIONS
    from loka_compile.lowering.recipes import HIGH_PRECISION
    from loka_compile.lowering.select import candidates
    from loka_compile.options import Options

    wanted = list(dict.fromkeys(_shapes(path)))
    if not torch.cuda.is_available():
        typer.echo("torch sees no CUDA device: nothing can be timed here")
        raise typer.Exit(2)
    device = torch.device("cuda")
    begun = time.monotonic()
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("timing", total=len(wanted) * len(DIRECTIONS))
        for shape in (GemmShape(*s) for s in wanted):
            place = Place(shape, torch.bfloat16, device)
            for direction in DIRECTIONS:
                names, _ = candidates(direction, shape, device, Options())
                for kernel in [HIGH_PRECISION, *names]:
                    if time.monotonic() - begun > seconds:
                        typer.echo("time is spent; run it again to go on")
                        return
                    price(direction, kernel, place, tune="auto")
                bar.advance(task)


def _tune(path: Path, seconds: float) -> None:
    import torch

    from loka_compile import _compat
    from loka_compile.errors import CostTableError

    wanted = list(dict.fromkeys(_shapes(path)))
    device = torch.device("cuda")
    why = _compat.why_no_triton() or _compat.why_no_fp8(device)
    if why is not None:
        typer.echo(f"tiles cannot be tuned here: {why}")
        raise typer.Exit(2)
    import sqlite3

    from loka_compile.lowering import tile_store
    from loka_compile.lowering.tune import tune_all

    begun, count = time.monotonic(), 0
    for tile in tune_all(wanted, device):
        try:
            tile_store.put([tile])
        except (sqlite3.Error, OSError) as error:
            raise CostTableError(tile_store.path(), str(error)) from error
        count += 1
        if time.monotonic() - begun > seconds:
            typer.echo("time is spent")
            break
    typer.echo(f"{count} tiles: {tile_store.path()}")


def _show(rows: list[CostRow], path: Path) -> None:
    from collections import Counter

    counts = Counter(
        (r.key.device, r.key.kernel, r.key.version, r.origin, r.why_stale() or "") for r in rows
    )
    console = Console(soft_wrap=True)
    console.print(f"your rows: {path}", markup=False)
    for (device, kernel, version, origin, stale), n in sorted(counts.items()):
        what = f"stale: {stale}" if stale else "in force"
        console.print(f"{n:>5}  {device}  {kernel} {version}  {origin}  {what}", markup=False)
    if not rows:
        console.print("no rows yet")
