"""Plan: site name -> decision. JSON, versioned, readable, mergeable.

A plan is what makes training, evaluation, resume and serving agree: which Mods are in force for
which parameters, and which kernel each GEMM takes, with the numbers that decided it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_compile.errors import PlanFileError
from loka_compile.errors import UnknownKernelError
from loka_compile.files import write_text
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.mod_set import EVERY
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import in_order
from loka_compile.mod_set import pairs_of

#: 2: `mods` names Mods; in 1 it was all of them or none.
VERSION = 2
KIND = "loka-plan"


@dataclass(frozen=True)
class Choice:
    """The kernel of one direction of one site, and why.

    Errors are those of the chosen kernel, or of the best refused one when the site stays high;
    `us` includes quantisation and layout; `speedup` is over the high-precision kernel. None: not
    measured.
    """

    kernel: str = HIGH_PRECISION
    library: str = "torch"
    recipe: str = HIGH_PRECISION
    mere: float | None = None
    mere_clamped: float | None = None
    bad_rows: float | None = None
    #: Predicted loss of this forward kernel alone, nats per sample (gate="budget").
    nats: float | None = None
    us: float | None = None
    speedup: float | None = None
    #: "measured", "estimated", "emulated", "forced", "plan" or "".
    source: str = ""
    reason: str = ""

    @property
    def is_low(self) -> bool:
        """Has this direction left the precision that the model was written in."""
        return self.kernel != HIGH_PRECISION

    @property
    def is_fp8(self) -> bool:
        """Left it for FP8; float32 layers may also take bf16."""
        return self.is_low and not self.kernel.startswith("bf16:")

    def kept_high(self, reason: str, source: str = "") -> Choice:
        """This choice with high precision in its kernel's place; its numbers stay, as evidence."""
        return replace(
            self,
            kernel=HIGH_PRECISION,
            library="torch",
            recipe=HIGH_PRECISION,
            source=source,
            reason=reason,
        )


@dataclass(frozen=True)
class SitePlan:
    """One GEMM site. M is the example batch the decision was made for."""

    name: str
    M: int
    K: int
    N: int
    dtype: str
    count: int = 1
    fused: str | None = None
    directions: Mapping[str, Choice] = field(default_factory=dict)

    def choice(self, direction: str) -> Choice:
        return self.directions.get(direction, Choice())

    @property
    def kernels(self) -> tuple[str, str, str]:
        fwd, dgrad, wgrad = (self.choice(d).kernel for d in DIRECTIONS)
        return (fwd, dgrad, wgrad)

    def in_high_precision(self, why: str) -> SitePlan:
        """The same where nothing of what was decided can run, because of `why`."""
        kept = {d: c.kept_high(why, c.source) for d, c in self.directions.items() if c.is_low}
        return replace(self, directions={**self.directions, **kept})

    def without_forward(self, why: str | None) -> SitePlan:
        """The same where its forward cannot be what was decided, because of `why`, if anything."""
        if why is None or not self.choice("fwd").is_low:
            return self
        kept = self.choice("fwd").kept_high(why, self.choice("fwd").source)
        return replace(self, directions={**self.directions, "fwd": kept})


@dataclass(frozen=True)
class Plan:
    sites: Mapping[str, SitePlan] = field(default_factory=dict)
    #: The Mods in force, and for which parameters (paths from the model's root).
    mods: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    #: Of these parameters: where it is fewer of them, because parts were compiled otherwise.
    fewer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Mod -> layers that it leaves as written all the same.
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    block: int | None = None
    #: Name patterns of the heads where the user gave some; None: the head rule.
    heads: tuple[str, ...] | None = None
    #: Norm -> the width of its BlockNorm blocks; None in plans from before norms had their own.
    blocks: Mapping[str, int] | None = field(default_factory=dict)
    emulated: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    #: Loss of the whole assignment on rows that no probe saw, nats per sample (gate="budget").
    replayed_nats: float | None = None

    @property
    def predicted_nats(self) -> float | None:
        """Predicted loss of all FP8 forwards together; None unless gate="budget" made the plan."""
        chosen = [s.choice("fwd") for s in self.sites.values()]
        if all(c.nats is None for c in chosen):
            return None
        return math.fsum(c.nats for c in chosen if c.is_low and c.nats is not None)

    @property
    def active(self) -> bool:
        """Has a choice been made for any site."""
        return bool(self.sites)

    def find(self, name: str, k: int, n: int) -> SitePlan | None:
        """The decision for a site of this name, if its shape is the one that was decided for."""
        site = self.sites.get(name)
        return site if site is not None and (k, n) == (site.K, site.N) else None

    def mods_of(self, names: Iterable[str]) -> tuple[str, ...] | None:
        """The Mods in force for parameters of one graph; None where it names none of them.

        Parts of a model may have been compiled with other Mods; of one part all have the same.
        """
        named = set(self.parameters).intersection(names)
        return self.fewer.get(min(named), self.mods) if named else None

    def digest(self) -> str:
        """Equal where two plans decide the same, whatever device they were made on."""
        body = self.to_dict()
        del body["env"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def merge(self, other: Plan) -> Plan:
        """This plan with `other`'s sites and parameters added; `other` wins where both speak."""
        both = {**self._each(), **other._each()}
        return replace(
            other,
            sites={**self.sites, **other.sites},
            **mods_in_force(both, in_order({*self.mods, *other.mods})),
            kept=by_mod([*self._kept_beside(other), *pairs_of(other.kept)]),
            blocks=None
            if self.blocks is None and other.blocks is None
            else {**(self.blocks or {}), **(other.blocks or {})},
        )

    def _each(self) -> dict[str, tuple[str, ...]]:
        return {name: self.fewer.get(name, self.mods) for name in self.parameters}

    def _kept_beside(self, other: Plan) -> list[tuple[str, str]]:
        """What is kept of layers that `other` does not speak of."""
        if not set(self.parameters) - set(other.parameters):
            # It speaks of all, of activations too, which have no parameter to be named by.
            return []
        theirs = {name.removesuffix(".weight") for name in other.parameters}
        return [pair for pair in pairs_of(self.kept) if pair[1] not in theirs]

    # -- files ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        body = asdict(self)
        body["sites"] = [asdict(site) for _, site in sorted(self.sites.items())]
        body["mods"], body["parameters"] = list(self.mods), list(self.parameters)
        body["blocks"] = None if self.blocks is None else dict(sorted(self.blocks.items()))
        return {"kind": KIND, "version": VERSION, **body}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write atomically: a reader sees the old file or the new one, never half of one.

        Raises PlanFileError where something else, or a newer plan, stands at `path`.
        """
        target = Path(path)
        if target.exists():
            Plan.load(target)
        return write_text(target, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Raises PlanFileError for a missing, damaged, foreign or newer file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise PlanFileError(path, "no such file") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanFileError(path, f"cannot be read as JSON ({error})") from error
        return cls.from_dict(data, path)

    @classmethod
    def from_dict(cls, data: Any, path: object = "<dict>") -> Plan:
        if not isinstance(data, Mapping) or data.get("kind") != KIND:
            raise PlanFileError(path, f"not a plan (no 'kind': '{KIND}')")
        version = data.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise PlanFileError(
                path, f"version {version}, this loka-compile reads up to {VERSION}; upgrade it"
            )
        try:
            sites = {}
            for row in data["sites"]:
                directions = {d: Choice(**c) for d, c in row["directions"].items()}
                _check_kernels(path, row["name"], directions)
                sites[row["name"]] = SitePlan(**{**row, "directions": directions})
            return cls(
                sites=sites,
                mods=_names(path, data["mods"]),
                parameters=tuple(data["parameters"]),
                fewer={str(n): _names(path, m) for n, m in data.get("fewer", {}).items()},
                kept=_kept(path, data.get("kept", {})),
                block=data["block"],
                heads=None if data.get("heads") is None else tuple(data["heads"]),
                blocks=None
                if data.get("blocks") is None
                else {str(n): int(b) for n, b in data["blocks"].items()},
                emulated=bool(data["emulated"]),
                env=dict(data["env"]),
                replayed_nats=data.get("replayed_nats"),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanFileError(path, f"damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def of_option(cls, value: Any) -> Plan | None:
        """What `options={"plan": ...}` accepts: a Plan, a path, a dict, or None."""
        if value is None or isinstance(value, Plan):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        return cls.load(value)


def mods_in_force(
    each: Mapping[str, tuple[str, ...]], mods: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """parameter -> its Mods, as the fields `mods`, `parameters` and `fewer` of a Plan."""
    whole = in_order(n for names in each.values() for n in names) if mods is None else mods
    return {
        "mods": whole,
        "parameters": tuple(sorted(each)),
        "fewer": {name: own for name, own in sorted(each.items()) if own != whole},
    }


def _names(path: object, value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return EVERY if value else ()
    for name in value:
        if name not in EVERY:
            raise PlanFileError(path, f"unknown Mod {name!r}; known: {', '.join(EVERY)}")
    return in_order(value)


def _kept(path: object, value: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    _names(path, list(value))
    return {mod: tuple(map(str, layers)) for mod, layers in value.items()}


def _check_kernels(path: object, site: str, directions: Mapping[str, Choice]) -> None:
    # Imported here: plans are read by tools that need no kernel library.
    from loka_compile.lowering.libraries import check_kernel_name

    for direction, choice in directions.items():
        if direction not in DIRECTIONS:
            raise PlanFileError(path, f"{site}: unknown direction {direction!r}")
        try:
            check_kernel_name(choice.kernel)
        except UnknownKernelError as error:
            raise PlanFileError(path, f"{site}, {direction}: {error}") from error
