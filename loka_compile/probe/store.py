"""Probe state on disk: one safetensors file per save, with a JSON header; atomic and versioned.

    tensors   `<site>|<x or g>|moments`, `...|scalars` (fp64), `...|coherence` (fp32) of gradients,
              `...|scatter` (fp64, lower triangle) of inputs where it is kept, `...|rows`,
              `...|sketch` and `...|marks` only on request (they are the user's data),
              `<site>|w|summary` (fp64), and `...|mean`, `...|u`, `...|v` of the matrix-normal of a
              weight, on request
    metadata  kind, version, torch version, the training step, and per observed tensor its features,
              dtype and summary, and whether a gradient's rows are no pairs of its input's

A killed save leaves the previous file. A damaged, foreign or newer file is an error and is never
overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import astuple
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors import safe_open
from safetensors.torch import save_file

from loka_compile.errors import ProbeFileError
from loka_compile.files import replacing
from loka_compile.lowering.balance import StepTimes
from loka_compile.probe import sketch as sk
from loka_compile.probe.covariance import packed
from loka_compile.probe.covariance import unpacked
from loka_compile.probe.matrix_normal import MatrixNormal
from loka_compile.probe.statistics import CANDIDATES
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RESERVOIR
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import SCALARS
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import coherences

VERSION = 3
KIND = "loka-probe"
#: Of a matrix-normal: tensors of that name, fp64.
_PARTS = ("mean", "u", "v")

#: (site name, "x" or "g") -> statistics.
ProbeState = Mapping[tuple[str, str], Statistics]


@dataclass(frozen=True)
class Loaded:
    """What a file holds: statistics, weight numbers (`probe.weights.FIELDS`), the training step."""

    statistics: dict[tuple[str, str], Statistics]
    weights: dict[str, torch.Tensor]
    step: int
    #: layer -> distribution of its weight, where one was learnt.
    weight_models: dict[str, MatrixNormal] = field(default_factory=dict)
    #: First site of a graph -> microseconds of its step in high precision (`step_meter.py`).
    steps: dict[str, StepTimes] = field(default_factory=dict)


def save(
    state: ProbeState,
    path: str | os.PathLike[str],
    *,
    rows: bool = False,
    weights: Mapping[str, torch.Tensor] | None = None,
    step: int = 0,
    weight_models: Mapping[str, MatrixNormal] | None = None,
    steps: Mapping[str, StepTimes] | None = None,
) -> Path:
    """Write `state`; rows=True also writes the reservoirs (real rows of the user's data).

    weights: site -> row of `probe.weights`. step: the training step of this state. weight_models:
    layer -> distribution of its weight (an average of the weight itself is part of it). steps:
    first site of a graph -> what its step takes.

    Raises ProbeFileError where something else, or a newer state, stands at `path`.
    """
    target = Path(path)
    if target.exists():
        _header(target)
    tensors: dict[str, torch.Tensor] = {}
    observed = []
    for (site, role), held in sorted(state.items(), key=lambda item: item[0]):
        name = f"{site}|{role}"
        tensors[f"{name}|moments"] = held.moments.cpu().contiguous()
        tensors[f"{name}|scalars"] = held.scalars.cpu().contiguous()
        if held.coherence is not None:
            tensors[f"{name}|coherence"] = held.coherence.cpu().contiguous()
        if held.scatter is not None:
            tensors[f"{name}|scatter"] = packed(held.scatter.cpu())
        if rows:
            tensors[f"{name}|rows"] = held.rows.cpu().contiguous()
            if held.sketch is not None and held.marks is not None:
                tensors[f"{name}|sketch"] = held.sketch.cpu().contiguous()
                tensors[f"{name}|marks"] = held.marks.cpu().contiguous()
        observed.append(
            {
                "site": site,
                "role": role,
                "features": held.moments.shape[1],
                "dtype": str(held.rows.dtype).removeprefix("torch."),
                "summary": held.summary(),
                "mixed": held.pairing is not None and held.pairing.mixed,
            }
        )
    for site, row in (weights or {}).items():
        tensors[f"{site}|w|summary"] = row.cpu().contiguous()
    learnt = {}
    for site, one in (weight_models or {}).items():
        for part in _PARTS:
            tensors[f"{site}|w|{part}"] = getattr(one, part).contiguous()
        learnt[site] = [one.momentum, one.updates, one.followed]
    metadata = {
        "matrix_normal": json.dumps(learnt, allow_nan=False),
        "steps": json.dumps({name: astuple(one) for name, one in (steps or {}).items()}),
        "kind": KIND,
        "step": str(step),
        "version": str(VERSION),
        "torch": torch.__version__,
        "rows": str(rows).lower(),
        "observed": json.dumps(observed, allow_nan=False),
    }
    with replacing(target) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return target


def load(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[tuple[str, str], Statistics]:
    """Read saved statistics onto `device`. Without saved rows the reservoirs start empty again."""
    return load_all(path, device).statistics


def load_all(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Loaded:
    """As `load`, with the weights' numbers and the step."""
    source = Path(path)
    metadata = _header(source)
    found = {}
    with _opened(source) as file:
        names = set(file.keys())
        for one in json.loads(metadata["observed"]):
            name = f"{one['site']}|{one['role']}"
            try:
                moments = file.get_tensor(f"{name}|moments")
                scalars = file.get_tensor(f"{name}|scalars")
                dtype = getattr(torch, one["dtype"])
                features = int(one["features"])
            except (SafetensorError, AttributeError, KeyError) as error:
                raise ProbeFileError(path, f"damaged at {name} ({error})") from error
            if moments.shape != (5, features) or scalars.shape not in ((SCALARS,), (HEAD + RING,)):
                raise ProbeFileError(path, f"damaged at {name}: shapes do not fit")
            held = Statistics.empty(
                features, dtype, torch.device(device), gradient=one["role"] == "g"
            )
            if held.pairing is not None:
                held.pairing.mixed = bool(one.get("mixed"))
            held.moments.copy_(moments)
            # Version 1 had the ring of maxima only.
            held.scalars[: len(scalars)] = scalars.to(held.scalars.device)
            if held.coherence is not None and f"{name}|coherence" in names:
                # Up to version 2 there were fewer of them.
                coherence = file.get_tensor(f"{name}|coherence")
                held.coherence[: len(coherence)] = coherence.to(held.coherence.device)
            if held.sketch is not None and held.marks is not None and f"{name}|sketch" in names:
                held.sketch.copy_(file.get_tensor(f"{name}|sketch"))
                held.marks.copy_(file.get_tensor(f"{name}|marks"))
            if f"{name}|scatter" in names:
                triangle = file.get_tensor(f"{name}|scatter")
                if triangle.numel() != features * (features + 1) // 2:
                    raise ProbeFileError(path, f"damaged at {name}: shapes do not fit")
                held = replace(held, scatter=unpacked(triangle, features).to(device))
            if f"{name}|rows" in names:
                held.rows.copy_(file.get_tensor(f"{name}|rows"))
            else:
                held.scalars[CANDIDATES] = 0
            found[(one["site"], one["role"])] = held
        weights = {
            name.removesuffix("|w|summary"): file.get_tensor(name)
            for name in sorted(names)
            if name.endswith("|w|summary")
        }
        models = {}
        for site, (momentum, updates, followed) in json.loads(
            metadata.get("matrix_normal", "{}")
        ).items():
            try:
                mean, u, v = (file.get_tensor(f"{site}|w|{part}") for part in _PARTS)
            except SafetensorError as error:
                raise ProbeFileError(path, f"damaged at {site} ({error})") from error
            models[site] = MatrixNormal(mean, u, v, momentum, updates, followed)
        try:
            timed = json.loads(metadata.get("steps", "{}")).items()
            steps = {name: StepTimes(*times) for name, times in timed}
        except (ValueError, TypeError, AttributeError) as error:
            raise ProbeFileError(path, f"damaged at steps ({error})") from error
    return Loaded(found, weights, int(metadata.get("step", "0")), models, steps)


def bytes_per_site(k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Memory of one site's state (input and output gradient), in bytes."""
    size = torch.empty((), dtype=dtype).element_size()
    both = sum((RESERVOIR + 1) * c * size + 5 * c * 8 + SCALARS * 8 for c in (k, n))
    sketch = sk.ROWS * (sk.GY + sk.X) * size + (sk.SLOTS + 1) * sk.WIDTH * 8
    return both + coherences(n) * n * 4 + sketch


def _header(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        metadata = file.metadata() or {}
    if metadata.get("kind") != KIND:
        raise ProbeFileError(path, f"not probe state (no kind {KIND!r} in its header)")
    version = metadata.get("version", "")
    if not version.isdigit() or int(version) > VERSION:
        raise ProbeFileError(
            path, f"version {version!r}, this loka-compile reads up to {VERSION}; upgrade it"
        )
    return dict(metadata)


class _opened:
    """A safetensors file, whose every way to be unreadable is one ProbeFileError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self):
        try:
            self.file = safe_open(str(self.path), framework="pt", device="cpu")
            return self.file.__enter__()
        except FileNotFoundError:
            raise ProbeFileError(self.path, "no such file") from None
        except (SafetensorError, OSError) as error:
            raise ProbeFileError(self.path, f"cannot be read ({error})") from error

    def __exit__(self, *exc: object) -> None:
        self.file.__exit__(*exc)


def sites(state: ProbeState) -> Iterator[str]:
    """The site names of a state, each once, in order."""
    yield from dict.fromkeys(site for site, _ in sorted(state))
