"""`loka bench`: the cost table, shown, exported, imported, and filled on a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

    from loka_compile.lowering.cost_table import CostKey
    from loka_compile.lowering.cost_table import CostRow
    from loka_compile.lowering.measure import Cost
    from loka_compile.lowering.parts import Place


def bench(
    shapes: Annotated[Path | None, typer.Option(help="JSON: a list of [M, K, N].")] = None,
    model: Annotated[
        str | None, typer.Option(help="A reference model, NAME or NAME:SCALE (wukong:base).")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="With --model: rows per step; repeat it for more.")
    ] = None,
    from_report: Annotated[
        Path | None, typer.Option(help="A saved report (.json): the sites of your own model.")
    ] = None,
    params: Annotated[
        str, typer.Option(help="With --model and --shapes: bf16, fp16, fp32 or tf32 parameters.")
    ] = "bf16",
    libraries: Annotated[
        str | None, typer.Option(help="Comma-separated, e.g. loka,torch; all when left out.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Stop when this much time is spent.")] = 600.0,
    import_: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            help="Rows: an export, or the JSON of the GEMM or backward benchmark; later files win.",
        ),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write rows as JSON here.")] = None,
    tiles: Annotated[
        bool, typer.Option(help="With SHAPES: tune our own kernel's tiles there, and keep them.")
    ] = False,
    imported_only: Annotated[
        bool, typer.Option(help="With --export: only the rows of --import, not the table's.")
    ] = False,
    stamp: Annotated[
        bool,
        typer.Option(
            help="With --import: rows of our own kernels hold for the kernels that are here. Only "
            "after a change to their sources that cannot have changed their speed."
        ),
    ] = False,
) -> None:
    """Show the cost table, or fill it: every kernel at the sites of a model, a report or a list.

    Each kernel is timed alone, and what moves memory (quantising, epilogues and their gradients) at
    a few sizes that stand for all. What has a row is skipped: run it again to go on where the time
    was spent.
    """
    from loka_compile.cli import one_line_errors

    with one_line_errors():
        from loka_compile.lowering import cost_table
        from loka_compile.lowering.cost_store import Store
        from loka_compile.lowering.cost_store import default_path
        from loka_compile.lowering.cost_store import default_table

        store = Store(default_path())
        store.rows()  # A damaged table is an error here.
        found = [row for path in import_ or () for row in _imported(path)]
        if stamp:
            from loka_compile.lowering.cost_import import stamped

            found = stamped(found)
        imported = list({row.key: row for row in found}.values())
        if imported and not imported_only:
            default_table().put(imported)
        fills = shapes is not None or model is not None or from_report is not None
        if tiles and shapes is not None:
            _tune(shapes, seconds)
        elif fills:
            _fill(shapes, model, batch or [4096], from_report, params, libraries, seconds)
        rows = imported if imported_only else default_table().rows()
        if export is not None:
            typer.echo(f"{len(rows)} rows: {cost_table.export_rows(rows, export)}")
        if not fills and export is None:
            _show(rows, store.path)


def _imported(path: Path) -> list[CostRow]:
    from loka_compile.lowering.cost_import import rows_of_backward
    from loka_compile.lowering.cost_import import rows_of_benchmark
    from loka_compile.lowering.cost_table import KIND
    from loka_compile.lowering.cost_table import import_rows

    text = path.read_text(errors="replace") if path.exists() else ""
    if '"fused_rows_us"' in text:
        return rows_of_backward(path)
    if text and f'"kind": "{KIND}"' not in text[:200]:
        return rows_of_benchmark(path) + rows_of_benchmark(path, kernels_alone=True)
    return list(import_rows(path))


def _read(path: Path) -> Any:
    from loka_compile.errors import CostTableError

    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostTableError(path, "no such file") from None
    except (OSError, ValueError) as error:
        raise CostTableError(path, f"cannot be read as JSON ({error})") from error


def _sizes(path: Path) -> list[tuple[int, int, int]]:
    """A list of [M, K, N]."""
    from loka_compile.errors import CostTableError

    try:
        return [(int(m), int(k), int(n)) for m, k, n in _read(path)]
    except (ValueError, TypeError) as error:
        raise CostTableError(path, f"no list of [M, K, N] ({error})") from error


def _of_shapes(path: Path, dtype: torch.dtype, device: torch.device) -> list[Place]:
    from loka_compile.lowering.libraries.base import GemmShape
    from loka_compile.lowering.parts import Place

    return [Place(GemmShape(*one), dtype, device) for one in _sizes(path)]


def _of_report(path: Path, device: torch.device) -> list[Place]:
    """The sites of a saved report. Of a chain it says which, and not whether it has a gain: the
    norm's own gain stays unless the Mods were baked in, so it counts as there."""
    import torch

    from loka_compile.errors import CostTableError
    from loka_compile.kernels.block_norm import block_of
    from loka_compile.lowering.epilogue import Epilogue
    from loka_compile.lowering.libraries.base import GemmShape
    from loka_compile.lowering.parts import Place

    places = []
    data = _read(path)
    try:
        for site in data["sites"]:
            m, k, n = (int(site[size]) for size in ("M", "K", "N"))
            epilogue = ""
            if site["fused"]:
                _, _, *rest = str(site["fused"]).split("+")
                act = next((part for part in rest if part != "gate"), "none")
                epilogue = str(Epilogue(block_of(n), act, True, "gate" in rest))
            shape = GemmShape(m, k, n, epilogue)
            dtype = getattr(torch, str(site["dtype"]))
            places.append(Place(shape, dtype, device, epilogue=epilogue))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostTableError(path, f"no report ({type(error).__name__}: {error})") from error
    return places


def _of_model(
    text: str, batches: list[int], dtype: torch.dtype, device: torch.device
) -> list[Place]:
    from loka_compile.model_sites import places_of
    from loka_compile.model_sites import zoo_model

    try:
        model, inputs_of = zoo_model(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    model = model.to(dtype)
    found = []
    for rows in batches:
        inputs = [
            x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs_of(rows)
        ]
        found += [one.place for one in places_of(model, inputs, device)]
    return found


def _gpu() -> torch.device | None:
    import torch

    return torch.device("cuda") if torch.cuda.is_available() else None


def _fill(
    shapes: Path | None,
    model: str | None,
    batches: list[int],
    report: Path | None,
    params: str,
    libraries: str | None,
    seconds: float,
) -> None:
    import torch
    from rich.progress import Progress

    from loka_compile.lowering.cost_store import default_table
    from loka_compile.lowering.fill import fill
    from loka_compile.lowering.fill import wanted_at
    from loka_compile.options import Options

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes.get("fp32" if params == "tf32" else params)
    if dtype is None:
        raise typer.BadParameter(f"unknown params {params!r}; use bf16, fp16, fp32 or tf32")
    device = _gpu()
    if device is None:
        typer.echo("torch sees no CUDA device: nothing can be timed here")
        raise typer.Exit(2)
    if dtype == torch.float32:
        torch.set_float32_matmul_precision("high" if params == "tf32" else "highest")
    places: list[Place] = []
    if shapes is not None:
        places += _of_shapes(shapes, dtype, device)
    if model is not None:
        places += _of_model(model, batches, dtype, device)
    if report is not None:
        places += _of_report(report, device)
    chosen = None if libraries is None else tuple(t.strip() for t in libraries.split(","))
    wanted = wanted_at(places, Options(libraries=chosen))
    counts = {"timed": 0, "had a row": 0, "failed": 0}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("timing", total=len(wanted))

        def told(key: CostKey, cost: Cost | None) -> None:
            what = "had a row" if cost is None else "failed" if cost.us is None else "timed"
            counts[what] += 1
            bar.update(task, advance=1, description=f"{key.direction} {key.kernel}")

        done = fill(wanted, device, default_table(), seconds, told)
    said = ", ".join(f"{n} {what}" for what, n in counts.items())
    typer.echo(f"{len(wanted)} parts of {len(places)} sites: {said}")
    if not done:
        typer.echo("time is spent; run it again to go on")


def _tune(path: Path, seconds: float) -> None:
    import torch

    from loka_compile import _compat
    from loka_compile.errors import CostTableError

    wanted = list(dict.fromkeys(_sizes(path)))
    device = torch.device("cuda")
    why = _compat.why_no_triton() or _compat.why_no_fp8(device)
    if why is not None:
        typer.echo(f"tiles cannot be tuned here: {why}")
        raise typer.Exit(2)
    import sqlite3

    from loka_compile.lowering import tile_store
    from loka_compile.lowering.compile_pool import precompile
    from loka_compile.lowering.tune import jobs
    from loka_compile.lowering.tune import tune_all

    begun, count = time.monotonic(), 0
    precompile(jobs(wanted, device), device, seconds / 2)
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
