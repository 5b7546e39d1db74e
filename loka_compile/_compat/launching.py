"""Triton's launcher, and the C function behind it.

`CompiledKernel.run` is Python around one C function: a call of it looks for scratch to allocate,
and builds the tensor map of every descriptor anew. A kernel that wants no scratch can be started by
the C function itself, and tensor maps can be kept.

What that function takes before the kernel's own arguments is Triton's affair and changes:

    3.6         one function per signature: ..., scratch, metadata, hooks, each argument by place
    3.7, 3.8    one for all: ..., metadata, hooks, scratch, how to read arguments, all of them

Known are these. Anything else is started as Triton does it. Condition of removal: a launcher of
Triton's own that a step can afford.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("loka_compile")

#: (grid of three, stream, arguments, more arguments): starts a kernel.
Start = Callable[[tuple[int, int, int], int, Sequence[Any], Sequence[Any]], None]

#: How the C function reads what comes before a kernel's own arguments, as its source says.
_BY_PLACE = "iiiKKppOOOOOO"
_IN_ONE = "iiiKKpp(iii)OOOOOOy*O"


class DirectLaunch:
    """`start` as above: tensors or their addresses, a descriptor as `expanded` gives it."""

    def __init__(self, start: Start, expand: Callable[[Any, Any], list[Any]], maps: list[Any]):
        self.start = start
        self._expand = expand
        self._maps = maps

    def expanded(self, which: int, descriptor: Any) -> list[Any]:
        """What stands for the kernel's descriptor number `which` among its arguments.

        A tensor map is made of the address, shape, strides, padding and the kernel's own block: it
        may be used again for a tensor that agrees in these, and holds no tensor alive.
        """
        return self._expand(descriptor, self._maps[which])


def direct_launch(compiled: Any, arguments: Sequence[Any]) -> DirectLaunch | None:
    """How to start a `CompiledKernel` that has run once with `arguments`; None where it is not
    known for certain. `arguments`: all but the constants, which come last."""
    try:
        return _direct_launch(compiled, arguments)
    except Exception as error:
        log.debug("kernels are started as Triton does it: %s", error)
        return None


def _direct_launch(compiled: Any, arguments: Sequence[Any]) -> DirectLaunch | None:
    form = _form()
    if form is None:
        return None
    from triton.backends.nvidia import driver

    run, metadata, packed = compiled.run, compiled.metadata, compiled.packed_metadata
    launch = _c_function(run.launch)
    kinds = tuple(compiled.src.signature.values())
    described = sum(_is_descriptor(kind) for kind in kinds)
    maps = list(getattr(metadata, "tensordesc_meta", None) or [])
    if (
        type(run) is not driver.CudaLauncher
        or launch is None
        or run.global_scratch_size != 0
        or run.profile_scratch_size != 0
        or getattr(run, "gsan_enabled", False)
        or not (isinstance(packed, tuple) and [type(p) for p in packed] == [int] * 3)
        or not isinstance(compiled.function, int)
        or not _agree(kinds, arguments)
        or len(maps) != described
        or any(not isinstance(one, dict) or one.get("is_im2col", False) for one in maps)
    ):
        return None
    switches = (compiled.function, bool(run.launch_cooperative_grid), bool(run.launch_pdl))
    if form == _BY_PLACE:
        before = (*switches, None, None, packed, None, None, None)
        behind = (None,) * (len(kinds) - len(arguments))

        def by_place(grid, stream, arguments, more):
            launch(*grid, stream, *before, *arguments, *more, *behind)

        return DirectLaunch(by_place, driver.make_tensordesc_arg, maps)
    annotations, reading = run.arg_annotations, run.kernel_signature
    # Each descriptor of two dimensions is a map, two sizes and two strides.
    count = sum(_places(kind) for kind in kinds)
    if (
        launch is not driver.triton.runtime.driver.active.utils.launch
        or not isinstance(annotations, list)
        or len(annotations) != count
        or not isinstance(reading, bytes)
        or len(reading) != sum(_places(kind) for kind in kinds if kind != "constexpr")
    ):
        return None
    # Without those of the constants, which then need not be passed.
    annotations = annotations[: count - (len(kinds) - len(arguments))]
    ahead = (*switches, packed, None, None, None, None, None, annotations, reading)

    def in_one(grid, stream, arguments, more):
        launch(*grid, stream, *ahead, (*arguments, *more))

    expand = driver.make_tensordesc_arg
    if expand.__code__.co_argcount == 3:
        return DirectLaunch(in_one, lambda one, found: expand(one, found, None), maps)
    return DirectLaunch(in_one, expand, maps)


@functools.cache
def _form() -> str | None:
    """How the C function of this Triton is called."""
    try:
        import triton
        from triton.backends.nvidia import driver

        release = tuple(int(n) for n in triton.__version__.split(".")[:2])
        if release == (3, 6):
            return _BY_PLACE if driver._BASE_ARGS_FORMAT == _BY_PLACE else None
        if release in ((3, 7), (3, 8)):
            source = Path(driver.__file__).with_name("driver.c").read_text(encoding="utf-8")
            return _IN_ONE if f'"{_IN_ONE}"' in source else None
    except Exception:
        return None
    return None


def _c_function(launch: Any) -> Any | None:
    """The C function that `launch` is, or wraps to make descriptors into tensor maps."""
    if isinstance(launch, types.FunctionType) and launch.__name__ == "inner":
        names = launch.__code__.co_freevars
        if "launcher" in names and launch.__closure__ is not None:
            launch = launch.__closure__[names.index("launcher")].cell_contents
    known = isinstance(launch, types.BuiltinFunctionType) and launch.__name__ == "launch"
    return launch if known else None


def _is_descriptor(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc<")


def _places(kind: Any) -> int:
    """How many arguments of the C function one of the kernel's is."""
    return 1 + 2 * (kind.count(",") + 1) if _is_descriptor(kind) else 1


def _agree(kinds: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """The kernel's signature is that of `arguments`, with nothing but constants behind them."""
    import torch

    if not all(isinstance(kind, str) for kind in kinds) or len(kinds) < len(arguments):
        return False
    for kind, argument in zip(kinds, arguments, strict=False):
        if hasattr(argument, "block_shape"):
            fits = _is_descriptor(kind)
        elif isinstance(argument, torch.Tensor):
            fits = kind.startswith("*")
        else:
            # An integer of 1 is compiled in, and still has its place.
            fits = type(argument) in (int, float) and not kind.startswith(("*", "tensordesc"))
        if not fits:
            return False
    return all(kind == "constexpr" for kind in kinds[len(arguments) :])
