"""The first use of a kernel on a shape: does it run, and does it give the right numbers?

A predicate cannot know every hole of a library (cuBLASLt refuses some row-scaled shapes, JIT
compilers fail, kernels assume tails that a shape has not), so a candidate runs once on the real
shape before it may be chosen, and its result is compared with the dequantised product of the same
FP8 bytes. Odd shapes go first to a child process with a time limit: a kernel that reads out of
bounds leaves this process's CUDA context unusable, and one that hangs never returns.

The outcome is kept for the life of the process and, of real kernels, in the user's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator

import torch
from torch import Tensor

from loka_compile.lowering.first_use_calls import call_of
from loka_compile.lowering.first_use_child import Child
from loka_compile.lowering.first_use_memory import NO_MEMORY
from loka_compile.lowering.first_use_memory import Key
from loka_compile.lowering.first_use_memory import recall
from loka_compile.lowering.first_use_memory import remember
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION

#: Norm of the difference to the dequantised product over its norm. Same bytes on both sides; what
#: is left is the accumulator's width (1 % with fast accumulation over 100,000 products) and one
#: rounding to bf16. A misplaced scale is off by halves.
TOLERANCE = 0.05

#: (kernel, direction, shape, dtype)
Asked = tuple[str, str, GemmShape, torch.dtype]

_OUTCOMES: dict[Key, str | None] = {}


def why_failed(
    kernel: str, direction: str, shape: GemmShape, dtype: torch.dtype, device: torch.device
) -> str | None:
    """None when `kernel` ran on this GEMM and was right; else why it may not be chosen."""
    return check([(kernel, direction, shape, dtype)], device)[0]


def check(wanted: Iterable[Asked], device: torch.device) -> list[str | None]:
    """`why_failed` of several at once: those that need a child process share one."""
    device = torch.device(device)
    keys: list[Key] = [(*one, str(device)) for one in wanted]
    alone = []
    for key in dict.fromkeys(keys):
        if key in _OUTCOMES:
            continue
        kernel, direction, shape, _, _ = key
        why = _why_never(kernel, direction, shape, device)
        held = recall(key)
        if why is not None or kernel == HIGH_PRECISION:
            _OUTCOMES[key] = why
        elif held is not None:
            _OUTCOMES[key] = held[0]
        elif is_odd(shape):
            alone.append(key)
    tried: dict[Key, str | None] = {}
    with one_child() as child:
        if alone:
            child.ask(alone)
        for key in dict.fromkeys(keys):
            if key not in _OUTCOMES and key not in alone:
                tried[key] = run_and_compare(*key)
        for key, why in child.answers(alone).items():
            # What ran in a child runs here too: this process loads and compiles it before it is
            # timed.
            tried[key] = run_and_compare(*key) if why is None else why
    for key, why in tried.items():
        _OUTCOMES[key] = why
        remember(key, why)
    return [_OUTCOMES[key] for key in keys]


_CHILD: list[Child] = []


@contextlib.contextmanager
def one_child() -> Iterator[Child]:
    """The same child process for all that is checked inside."""
    if _CHILD:
        yield _CHILD[-1]
        return
    _CHILD.append(Child())
    try:
        yield _CHILD[-1]
    finally:
        _CHILD.pop().close()


def foresee(wanted: Iterable[Asked], device: torch.device) -> None:
    """Start the child, inside `one_child`, where it will be needed: it takes seconds, in which the
    caller may do something else. A shape of which some kernel is known is likely to need none."""
    known: dict[tuple[GemmShape, torch.dtype], bool] = {}
    for one in wanted:
        _, _, shape, dtype = one
        key: Key = (*one, str(device))
        if is_odd(shape) and not known.get((shape, dtype)):
            known[shape, dtype] = key in _OUTCOMES or recall(key) is not None
    if _CHILD and not all(known.values()):
        with contextlib.suppress(OSError):
            _CHILD[-1].start()


def forget() -> None:
    """Drop every outcome: after a library was installed, say."""
    _OUTCOMES.clear()


def is_odd(shape: GemmShape) -> bool:
    """Shapes with tails that kernels may be wrong about."""
    return bool(shape.k % 128 or shape.n % 128 or shape.m % 16 or shape.m < 64)


def _why_never(kernel: str, direction: str, shape: GemmShape, device: torch.device) -> str | None:
    if kernel == HIGH_PRECISION:
        return None
    library, recipe, emulated = split_kernel_name(kernel)
    why = library.why_not(recipe, direction, shape)
    return why if emulated else why or library.why_no_recipe(recipe, device)


# -- in this process ------------------------------------------------------------------------------


def run_and_compare(
    kernel: str, direction: str, shape: GemmShape, dtype: torch.dtype, device: str
) -> str | None:
    """Run `kernel` once on made-up operands; None when its result is right, else what is wrong."""
    try:
        with torch.no_grad(), torch.amp.autocast(torch.device(device).type, enabled=False):
            a, b = operands(direction, shape, dtype, torch.device(device))
            run = call_of(kernel, direction, shape)
            got = run(a, b, kernel)
            if got.is_cuda:
                torch.cuda.synchronize(got.device)
            want = run(a, b, kernel.removesuffix(EMULATED) + EMULATED)
            return why_wrong(got, want)
    except torch.OutOfMemoryError:
        return NO_MEMORY
    except Exception as e:
        said = str(e).strip().splitlines() or [""]
        return f"first use failed: {type(e).__name__}: {said[0][:200]}"


def operands(
    direction: str, shape: GemmShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Normal values, but with rows and groups of 128 of different size along both dimensions, so
    that a scale that lands on the wrong row or group shows."""
    m, k, n = shape.m, shape.k, shape.n
    sizes = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for rows, columns in sizes[direction]:
        down = torch.arange(rows, device=device)
        across = torch.arange(columns, device=device)
        size = torch.exp2((down * 7 % 5 + down // 128 * 3 % 3 - 3).float()).unsqueeze(1)
        size = size * torch.exp2((across * 5 % 3 + across // 128 * 2 % 3 - 2).float())
        noise = torch.randn(rows, columns, dtype=torch.float32, device=device, generator=generator)
        made.append((noise * size).to(dtype))
    return made[0], made[1]


def why_wrong(got: Tensor, want: Tensor) -> str | None:
    """Shape, finiteness and values of a kernel's result against the dequantised product."""
    if got.shape != want.shape:
        return f"first use gave shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not torch.isfinite(got).all():
        return "first use gave non-finite values on finite operands"
    # Row by row, so that small rows count: a wrong scale there is nothing beside a large row.
    error = (got.float() - want.float()).norm(dim=1)
    size = want.float().norm(dim=1)
    relative = float((error / size.clamp(min=1e-30)).max()) if got.numel() else 0.0
    if relative > TOLERANCE:
        return (
            f"first use differs from the dequantised product by {relative:.3g} of a row "
            f"({TOLERANCE} allowed)"
        )
    return None
