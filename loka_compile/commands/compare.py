"""``loka compare``: the same model several ways from many seeds, and what is left beside noise."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated

import typer

from loka_compile.commands.mods_flags import Keep
from loka_compile.commands.mods_flags import Mods
from loka_compile.commands.mods_flags import options_of

if TYPE_CHECKING:
    from loka_compile.train.study import StudyConfig


def compare(
    data: Annotated[
        str, typer.Option(help="kuairand:DIR, flights, criteo:FILE, parquet:FILE or synthetic.")
    ],
    model: Annotated[
        str, typer.Option(help="wukong, dcn_v2, dlrm, dhen, interformer or elfm.")
    ] = "wukong",
    scale: Annotated[str, typer.Option(help="tiny, small, base, or one of the model's own.")] = (
        "tiny"
    ),
    label: Annotated[
        str | None, typer.Option(help="Column to predict, where the data has several.")
    ] = None,
    dense: Annotated[
        str, typer.Option(help="Dense values: standard, log or raw (as they are).")
    ] = "standard",
    seeds: Annotated[int, typer.Option(help="Number of paired seeds.")] = 8,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    arms: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of original, bf16_mods, control (A/A), loka, fp8, fp8_no_bias, "
            "fp8_block_norm, fp8_hard_swish, fp8_all_mods."
        ),
    ] = "bf16_mods,loka,control,original",
    mods: Mods = None,
    keep: Keep = None,
    limit: Annotated[
        int | None, typer.Option(help="Use the first ROWS rows; all when left out.", metavar="ROWS")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows per step.")] = 512,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam (dense part).")] = 1e-3,
    table_lr: Annotated[
        float, typer.Option(help="Learning rate of row-wise Adagrad (embedding tables).")
    ] = 0.05,
    windows: Annotated[int, typer.Option(help="Equal parts of the run to report.")] = 10,
    eval_from: Annotated[
        int | None, typer.Option(help="First row of the headline figures.", metavar="ROW")
    ] = None,
    min_speedup: Annotated[
        float, typer.Option(help="Speed gate of the loka arm; 0: every accurate site runs FP8.")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    jobs: Annotated[int, typer.Option(help="Processes that train at the same time.")] = 1,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Start no further unit after this many seconds.", metavar="SECONDS"),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the study; run again to go on where it stopped.")
    ] = Path("loka-compare"),
    json: Annotated[
        Path | None, typer.Option(help="Write the result here too (default: OUT/result.json).")
    ] = None,
) -> None:
    """Compare arms over paired seeds by progressive validation, with an A/A control.

    precision question: loka (FP8 and Mods) against bf16_mods. modelling question: bf16_mods against
    original. control: bf16_mods from weights changed in the seventh digit, the noise floor. Every
    unit (seed, arm) is kept in OUT, so a run that was stopped goes on.

    What the Mods cost is in the modelling question: --mods and --keep say which of them, and where
    not, for the arms bf16_mods, control and loka.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from loka_compile.cli import one_line_errors

    with one_line_errors():
        from rich.console import Console

        from loka_compile.files import write_text
        from loka_compile.train.loop import TrainError
        from loka_compile.train.pairs import summarise
        from loka_compile.train.show_study import draw
        from loka_compile.train.show_study import show
        from loka_compile.train.study import StudyConfig
        from loka_compile.train.study import Unit
        from loka_compile.train.study import run_units

        for name, value in (("seeds", seeds), ("jobs", jobs), ("batch", batch)):
            if value < 1:
                raise TrainError(f"--{name} is {value}; it must be at least 1")
        config: StudyConfig = StudyConfig(
            data=data,
            label=label,
            dense=dense,
            model=model,
            scale=scale,
            batch=batch,
            limit=limit,
            arms=tuple(a.strip() for a in arms.split(",") if a.strip()),
            device=device,
            lr=lr,
            table_lr=table_lr,
            options={
                **options_of(mods, keep),
                "min_speedup": min_speedup,
                "tune": "never" if min_speedup == 0 else "auto",
                # Probes after the plan report drift and change nothing, for a compilation more.
                "probe_every": 0,
            },
        )
        chosen = range(first_seed, first_seed + seeds)
        units = [Unit(seed, arm) for seed in chosen for arm in config.arms]
        faults = run_units(out, config, units, jobs, time_limit)
        result = summarise(out, config, chosen, windows, eval_from)
        missing = [u for u in units if not u.path(out).exists()]
        result["missing"] = [f"{u.arm}, seed {u.seed}" for u in missing]
        result["faults"] = faults
        target = json or out / "result.json"
        write_text(target, json_module.dumps(result, indent=1, allow_nan=False) + "\n")
        console = Console()
        show(console, result)
        console.print(f"saved result: {target}", markup=False, soft_wrap=True)
        console.print(f"saved plot: {draw(result, target)}", markup=False, soft_wrap=True)
