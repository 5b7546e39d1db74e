"""Patterns of the user's: `pattern`, the set in force, and a test of one. See docs/patterns.md."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import itertools
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_compile.errors import PatternError

_SCOPED: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("patterns", default=())
_REGISTERED: list[Any] = []
_LOCK = threading.Lock()


class Pattern:
    """Torch code to look for and torch code to put in its place; made by `loka_compile.pattern`."""

    def __init__(
        self,
        function: Callable[..., Any],
        example: Callable[[], Sequence[Any]],
        before: str | Sequence[str] | None,
        after: str | Sequence[str] | None,
        preserves: bool | Callable[[Any], bool] = False,
        free: str | Sequence[str] | None = None,
        optional: str | Sequence[str] | None = None,
        says: str | Callable[[Any], str] | None = None,
    ) -> None:
        self.name = function.__name__
        self.function = function
        self.example = example
        self.before = _names(before)
        self.after = _names(after)
        self.preserves = preserves
        self.free = _names(free)
        self.optional = _names(optional)
        self.says = says
        self.replacement: Callable[..., Any] | None = None
        self.check: Callable[..., Any] | None = None
        self._pass: Any = None

    def replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the replacement, of the same arguments in the same order.

        It may have more by keyword only: constants, which `when` then returns as a dict.
        """
        self.replacement, self._pass = function, None
        return function

    def when(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator of a check, which gets a Match (`.shape`, `.dtype`, `.node` by argument).

        It returns True, or a dict of the replacement's constants; else the reason why not, "" where
        that is not worth a word.
        """
        self.check, self._pass = function, None
        return function

    def register(self) -> Pattern:
        """Put the pattern in force in the whole process. Returns it; raises PatternError."""
        _try(self)
        with _LOCK:
            if self not in _REGISTERED:
                _REGISTERED.append(self)
        return self

    def unregister(self) -> None:
        with _LOCK:
            if self in _REGISTERED:
                _REGISTERED.remove(self)

    def as_pass(self, tried: bool = True) -> Any:
        """The pass, traced at first need. Raises PatternError.

        tried: find out whether the replacement fits the example.
        """
        import torch

        from loka_compile.passes.user_pattern import UserPattern

        # No lock: tracing takes Dynamo's, and a thread that holds that one may come here.
        if self._pass is None:
            if self.replacement is None:
                raise PatternError(self.name, f"has no replacement: use @{self.name}.replace")
            with torch.random.fork_rng(devices=[]):
                example = self._example()
            self._pass = UserPattern(
                self.name,
                self.function,
                self.replacement,
                self.check,
                example,
                self.before,
                self.after,
                self.preserves,
                self.free,
                self.optional,
                self.says,
                self._sources,
                tried,
            )
        return self._pass

    def _sources(self) -> str:
        parts = (self.function, self.replacement, self.check, self.preserves, self.says)
        return "\n".join(map(_source, parts))

    def _example(self) -> tuple[Any, ...]:
        """One value per argument: what `example` gives, then the pattern's own defaults."""
        import torch

        try:
            given = self.example()
        except Exception as error:
            why = f"its example raises {type(error).__name__}: {error}"
            raise PatternError(self.name, why) from error
        # A tensor alone would be taken apart into its rows.
        values = (given,) if isinstance(given, torch.Tensor) else tuple(given)
        if not inspect.isfunction(self.function):
            return values
        parameters = list(inspect.signature(self.function).parameters.values())
        left = (p.default for p in parameters[len(values) :])
        return (*values, *itertools.takewhile(lambda d: d is not inspect.Parameter.empty, left))

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __repr__(self) -> str:
        return f"<pattern {self.name}>"


def pattern(
    *,
    example: Callable[[], Sequence[Any]],
    before: str | Sequence[str] | None = None,
    after: str | Sequence[str] | None = None,
    preserves: bool | Callable[[Any], bool] = False,
    free: str | Sequence[str] | None = None,
    optional: str | Sequence[str] | None = None,
    says: str | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., Any]], Pattern]:
    """Decorator of torch code that is to be looked for in every graph.

    example: gives arguments, of which only shapes, dtypes and devices matter, except to
    `check_pattern`. before, after: names of passes or patterns; default: before all built-in ones.
    preserves: the replacement computes the same, values and gradients; or a function of the match
    that says so. free: names of number and size arguments that match any; the replacement gets what
    was found. optional: names of tensor arguments that may be None in the model. says: what the
    report calls a use, or a function of the match that does.
    """

    def make(function: Callable[..., Any]) -> Pattern:
        return Pattern(function, example, before, after, preserves, free, optional, says)

    return make


@contextlib.contextmanager
def patterns(*chosen: Any) -> Iterator[None]:
    """In this block and thread, compiles that start also use these patterns."""
    for one in chosen:
        _try(one)
    token = _SCOPED.set((*_SCOPED.get(), *chosen))
    try:
        yield
    finally:
        _SCOPED.reset(token)


def _try(one: Any) -> None:
    """Trace now, so that a mistake shows here; not where nothing is going to be compiled."""
    if isinstance(one, Pattern) and os.environ.get("TORCHDYNAMO_DISABLE", "") != "1":
        one.as_pass()


def in_force(given: Sequence[Any]) -> tuple[Any, ...]:
    """Passes: of registered patterns, of the scope's, then those `given`; each once, checked."""
    with _LOCK:
        registered = tuple(_REGISTERED)
    chosen = list(dict.fromkeys((*registered, *_SCOPED.get(), *given)))
    if not chosen:
        return ()
    passes = tuple(dict.fromkeys(p.as_pass() if isinstance(p, Pattern) else p for p in chosen))
    from loka_compile.passes.registry import order

    order(passes, ())
    return passes


# -- a test of one pattern ------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """What `check_pattern` saw. Errors are the largest absolute ones on the example."""

    matches: int
    max_error: float
    max_gradient_error: float
    before: str
    after: str


def check_pattern(one: Pattern) -> Checked:
    """Apply a pattern to its own example, run both and, if it preserves, compare.

    Raises PatternError when it does not match exactly once, when the replacement fails, and, with
    preserves=True, when values or gradients differ (rtol 1e-4 in FP32); the message has both
    graphs.
    """
    from loka_compile.passes.pattern_check import check

    return Checked(*check(one.as_pass()))


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _source(function: Any) -> str:
    """Source, else bytecode; and what the function closes over, as far as it shows."""
    if not inspect.isfunction(function):
        return repr(function)
    code = function.__code__
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr((code.co_code, code.co_consts, code.co_names))
    held = [c.cell_contents for c in function.__closure__ or () if _is_plain(c)]
    return text + repr((held, function.__defaults__))


def _is_plain(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, (str, int, float, bool, tuple, type(None)))
    except ValueError:  # not set yet
        return False
