"""One class per user mistake. A message says what happened, where, and how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LokaError(Exception):
    """Base of everything that loka raises on purpose."""


class UnknownOptionError(LokaError):
    """An option name that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
        super().__init__(f"torch.compile(backend='loka'): unknown option {name!r}; {hint}")
        self.name = name


class BadOptionError(LokaError):
    """A known option with a value that it cannot have."""

    def __init__(self, name: str, value: object, want: str) -> None:
        super().__init__(f"option {name!r} = {value!r}: want {want}")
        self.name = name


class PatternMatchesNothingError(LokaError):
    """A name pattern in `heads`, `exclude`, `force` or `keep` that nothing here answers to."""

    def __init__(
        self, option: str, pattern: str, names: Iterable[str], what: str = "GEMM site"
    ) -> None:
        shown = ", ".join(list(names)[:12]) or "none"
        super().__init__(
            f"option {option!r}: pattern {pattern!r} matches no {what}; here are: {shown}. "
            "If the layer is in another graph of the model (a graph break, or blocks compiled one "
            "by one), call loka_compile.name_layers(model) before torch.compile"
        )


class PatternError(LokaError):
    """A user's pattern that cannot be used: not traceable, of other form, or ill ordered."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"pattern {name!r}: {why}")
        self.name = name


class PlanFileError(LokaError):
    """A plan file that is damaged, newer than this version, or not a plan."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(
            f"plan {path}: {why}. The file was left as it is; save a new plan with "
            "loka_compile.plan_of(model).save(path)"
        )


class ProbeFileError(LokaError):
    """A probe-state file that is damaged, newer than this version, or not probe state."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(f"probe state {path}: {why}. The file was left as it is")


class CostTableError(LokaError):
    """A cost table that is damaged, newer than this version, or something else."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(
            f"cost table {path}: {why}. The file was left as it is; move it away, or set "
            "LOKA_CACHE to another folder"
        )


class UnknownKernelError(LokaError):
    """A kernel name that no library adapter answers to."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known kernels: {', '.join(known)}"
        super().__init__(f"unknown kernel {name!r}; {hint}")


class DoubleBackwardError(LokaError):
    """Second-order gradients asked of an op whose gradient is closed form."""

    def __init__(self, op: str) -> None:
        super().__init__(
            f"{op}: second-order gradients are not supported through FP8 or fused ops; compute "
            "this gradient with the model uncompiled and without loka_compile.apply_mods, or set "
            "LOKA_DISABLE=1"
        )


class UnreadableParametersError(LokaError):
    """mods='auto' needs parameter values that cannot be read (meta or sharded tensors)."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(
            f"mods='auto' cannot judge {name!r}: its values are not readable here ({kind}); "
            "say options={'mods': 'on'} or options={'mods': 'off'}"
        )


class UnknownReportNameError(LokaError):
    """A site, pass or graph that the report does not know."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        known = list(dict.fromkeys(known)) or ["nothing: call the compiled model in the block"]
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(known)}"
        super().__init__(f"the report knows no {kind} {name!r}; {hint}")


class ReportFileError(LokaError):
    """A report file name with an ending that names no format, or a file that is no report."""

    def __init__(self, path: object, why: str = "") -> None:
        why = why or "cannot tell the format; end the name in .txt, .json or .html"
        super().__init__(f"report {path}: {why}")
