"""Options of the backend: one frozen dataclass, validated once at the door.

Nothing deeper in the package reads option dicts or the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_compile.errors import BadOptionError
from loka_compile.errors import UnknownOptionError
from loka_compile.mod_set import Keep
from loka_compile.mod_set import names_of
from loka_compile.mod_set import parse_keep
from loka_compile.mod_set import parse_mods

GATES = ("robust", "paper", "budget")
TUNE = ("auto", "never")
PROBE_MODELS = ("reservoir", "gaussian")
WEIGHT_MODELS = ("actual", "matrix_normal")
INNER = ("inductor", "aot_eager", "eager")
WEIGHT_CACHE = ("auto", "off", "frozen")

#: Steps of a training run that are probed before the plan is made (steps 1..PROBE_STEPS).
PROBE_STEPS = 8


@dataclass(frozen=True)
class Options:
    """Everything that `torch.compile(model, backend="loka", options={...})` accepts.

    The README holds the same table; `tests/test_options.py` keeps the two equal.
    """

    # -- what may change in the model's function ------------------------------------------------
    #: "auto": decide once per model (fresh models only), "on", "off"; or names out of
    #: `mod_set.EVERY`: on, but only these.
    mods: str | tuple[str, ...] = "auto"
    #: {Mod: name patterns of layers that it leaves as written}; None: the plan's, else none. No
    #: other option says this: a head also loses FP8, and `exclude` keeps no bias.
    keep: Keep | None = None
    #: BlockNorm block width in features; None = the rule of `kernels.block_norm.block_of`.
    block: int | None = None
    #: Name patterns (fnmatch) of the sites that count as heads; None = the head rule.
    heads: tuple[str, ...] | None = None
    #: Patterns (`loka_compile.pattern`) and passes of the user's; first, on the model as written.
    patterns: tuple[Any, ...] = ()

    # -- which sites may leave high precision ---------------------------------------------------
    exclude: tuple[str, ...] = ()
    #: {name pattern: kernel name} or {name pattern: {"fwd": ..., "dgrad": ..., "wgrad": ...}}.
    force: Mapping[str, Any] = field(default_factory=dict)
    gate: str = "robust"
    max_mere: float = 0.2
    min_speedup: float = 1.05
    #: Nats per sample that all FP8 forwards together may cost; used by gate="budget" only.
    loss_budget: float = 1e-4
    #: Library names that may be chosen; None = every one that runs here.
    libraries: tuple[str, ...] | None = None
    #: Recipe names that may be chosen; None = every one.
    recipes: tuple[str, ...] | None = None

    # -- how the choice is made -----------------------------------------------------------------
    tune: str = "auto"
    plan: Any = None
    emulate: bool = False
    weight_cache: str = "auto"

    # -- probe ----------------------------------------------------------------------------------
    #: After steps 1-8: one probed step, at a random place, in each window of so many; 0: none, and
    #: plain steps do not keep the maxima that their kernels find.
    probe_every: int = 100
    #: Folder of the statistics, saved every 10,000 steps and at exit, taken up again at start.
    probe_dir: Path | None = None
    #: Also save the reservoirs and sketches: real values of the user's data.
    probe_rows_on_disk: bool = False
    #: "gaussian": also keep the full covariance of inputs, the paper's model (K <= 4096).
    probe_model: str = "reservoir"
    #: "matrix_normal": also fit the paper's model of weights, at save time; needs a probe_dir.
    probe_weight_model: str = "actual"

    # -- compilation ----------------------------------------------------------------------------
    mode: str | None = None
    inner: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any] | Options | None, mode: str | None = None) -> Options:
        """Validate what the user gave; join the patterns in force (`user_patterns`).

        Raises UnknownOptionError or BadOptionError, both naming the option and the mend, and
        PatternError.
        """
        from loka_compile.user_patterns import in_force

        if isinstance(options, Options):
            options = replace(options, patterns=in_force(options.patterns))
            return options if mode is None else replace(options, mode=mode)
        given = dict(options or {})
        known = {f.name for f in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownOptionError(str(name), known)
        if mode is not None:
            given.setdefault("mode", mode)
        for name in ("heads", "exclude", "libraries", "recipes", "patterns"):
            value = given.get(name)
            if isinstance(value, str):
                given[name] = (value,)
            elif value is not None:
                given[name] = tuple(value)
        if given.get("probe_dir") is not None:
            given["probe_dir"] = Path(given["probe_dir"])
        if "mods" in given:
            given["mods"] = parse_mods(given["mods"])
        given["keep"] = parse_keep(given.get("keep"))
        given["patterns"] = in_force(given.get("patterns") or ())
        out = cls(**given)
        out._check()
        return out

    def _check(self) -> None:
        for name, choices in (
            ("gate", GATES),
            ("tune", TUNE),
            ("inner", INNER),
            ("weight_cache", WEIGHT_CACHE),
            ("probe_model", PROBE_MODELS),
            ("probe_weight_model", WEIGHT_MODELS),
        ):
            if getattr(self, name) not in choices:
                raise BadOptionError(name, getattr(self, name), " or ".join(map(repr, choices)))
        if self.probe_rows_on_disk and self.probe_dir is None:
            raise BadOptionError("probe_rows_on_disk", True, "a probe_dir to write the rows into")
        if self.probe_weight_model == "matrix_normal" and self.probe_dir is None:
            raise BadOptionError("probe_weight_model", "matrix_normal", "a probe_dir to keep it in")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise BadOptionError("block", self.block, "a positive number of features")
        if not self.max_mere > 0:
            raise BadOptionError("max_mere", self.max_mere, "a positive number")
        if not self.loss_budget > 0:
            raise BadOptionError("loss_budget", self.loss_budget, "a positive number of nats")
        if self.min_speedup < 0:
            raise BadOptionError("min_speedup", self.min_speedup, "zero or more")
        if not isinstance(self.probe_every, int) or self.probe_every < 0:
            raise BadOptionError(
                "probe_every", self.probe_every, "a number of steps, or 0 for steps 1-8 only"
            )
        for name in ("force", "inductor"):
            if not isinstance(getattr(self, name), Mapping):
                raise BadOptionError(name, getattr(self, name), "a dict")
        for name in ("heads", "exclude", "force"):
            for pattern in getattr(self, name) or ():
                keys = {part.partition("=")[0].strip() for part in pattern.split(",")}
                if "=" in pattern and (name == "heads" or not keys <= {"K", "N"}):
                    raise BadOptionError(
                        name,
                        pattern,
                        "a pattern of names, or (not in heads) K=432, N=256, K=432,N=256",
                    )

    @property
    def probes_in_turn(self) -> bool:
        """A probe after the plan asks a few sites. A CUDA graph would replay those that were asked
        when it was recorded, and scores want every site."""
        return not self.records_graphs and self.gate != "budget"

    @property
    def records_graphs(self) -> bool:
        """Are compiled steps recorded as CUDA graphs: by these options, or by Inductor's own."""
        if self.inner != "inductor":
            return False
        from torch._inductor import config

        return (
            self.mode in ("reduce-overhead", "max-autotune")
            or bool(self.inductor.get("triton.cudagraphs"))
            or config.triton.cudagraphs
        )

    @property
    def weighs_host(self) -> bool:
        """Plans are made online of compiled code whose kernels the host has to start."""
        # What eager code takes says nothing of compiled code.
        online = self.tune == "auto" and not self.emulate and self.inner == "inductor"
        return online and not self.records_graphs

    @property
    def wanted_mods(self) -> tuple[str, ...]:
        """The Mods that this call asks for; all where "auto" is to decide."""
        return names_of(self.mods)

    def check_names(self, libraries: Collection[str], recipes: Collection[str]) -> None:
        """`libraries` and `recipes` against what exists, which the backend knows."""
        for option, known in (("libraries", libraries), ("recipes", recipes)):
            for name in getattr(self, option) or ():
                if name not in known:
                    raise BadOptionError(option, name, "names out of " + ", ".join(sorted(known)))

    def fingerprint(self) -> str:
        """Text that differs whenever an option that shapes compiled code differs."""
        skip = {
            "probe_dir", "probe_every", "probe_rows_on_disk", "probe_weight_model", "plan",
            "patterns",
        }  # fmt: skip
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        return repr(sorted((k, repr(v)) for k, v in shown.items()))


@dataclass(frozen=True)
class Environment:
    """The environment switches, read at each backend call."""

    disable: bool
    logs: tuple[str, ...]
    dump: Path | None
    #: Folder of the user's cost table.
    cache: Path = Path()

    @classmethod
    def read(cls) -> Environment:
        disable = os.environ.get("LOKA_DISABLE", "").strip().lower() not in ("", "0", "false")
        logs = tuple(x.strip() for x in os.environ.get("LOKA_LOGS", "").split(",") if x.strip())
        dump = os.environ.get("LOKA_DUMP")
        return cls(disable, logs, Path(dump) if dump else None, user_cache())


def user_cache() -> Path:
    """`LOKA_CACHE`, else the platform's folder for caches of this user."""
    given = os.environ.get("LOKA_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "loka-compile"
