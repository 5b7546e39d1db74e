"""An op of ours and the fakes that it is given -> the fake of its result, computed once per form.

A large graph asks for thousands, most of them alike, and a dispatch of a fake op takes longer than
all else that a pass does to a node. Forms are kept, never tensors: each result has its own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from loka_compile import _compat

#: Fake mode -> (op, modes, arguments' forms) -> the results' forms; None where they cannot be had.
_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def result_of(target: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`function(*args)`, or what it would give, for `target`, which returns tensors of its own."""
    mode = next((a.fake_mode for a in args if isinstance(a, FakeTensor)), None)
    forms = [_argument(a) for a in args]
    if mode is None or None in forms or not _compat.plain_dispatch():
        return function(*args)
    known = _KNOWN.setdefault(mode, {})
    key = (target, tuple(forms), torch.is_grad_enabled(), _compat.autocast_state())
    if key not in known:
        result = function(*args)
        known[key] = _forms(result, args)
        return result
    found = known[key]
    if found is None:
        return function(*args)
    made = tuple(_compat.new_fake(mode, *form) for form in found[1])
    return made if found[0] else made[0]


#: Their result is like their first argument where that is contiguous and nothing autocasts.
_LIKE_INPUT = {F.layer_norm, F.silu, F.hardswish}


def like_input(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of a call of these torch functions; None where it has to be run.

    A fake run of one goes through its decomposition in Python: several ms for the first, which is
    one in a start with few shapes.
    """
    if target not in _LIKE_INPUT or not args or not isinstance(args[0], FakeTensor):
        return None
    given = [*args, *kwargs.values()]
    x, tensors = args[0], list(_tensors(given))
    form = _form(x)
    plain = form is not None and x.is_contiguous() and x.is_floating_point()
    # In place, of mixed dtypes, or cast by autocast: torch says what comes of it.
    if not plain or any(a is True for a in given) or {a.dtype for a in tensors} != {x.dtype}:
        return None
    if any(on for _, on, _ in _compat.autocast_state()) or not _compat.plain_dispatch():
        return None
    needs = torch.is_grad_enabled() and any(a.requires_grad for a in tensors)
    shape, stride, dtype, device, _ = form
    return _compat.new_fake(x.fake_mode, shape, stride, dtype, device, needs)


def _argument(value: Any) -> Any:
    """What a result's form may depend on; None where it may depend on a symbol."""
    if isinstance(value, torch.Tensor):
        # A parameter of the caller's, or a subclass, is not ours to take for a plain fake.
        return _form(value) if isinstance(value, FakeTensor) else None
    if isinstance(value, (list, tuple)):
        parts = tuple(map(_argument, value))
        return None if None in parts else (type(value), parts)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    return None


def _form(value: torch.Tensor) -> Any:
    sizes, strides = tuple(value.shape), tuple(value.stride())
    if value.layout is not torch.strided or not all(isinstance(s, int) for s in sizes + strides):
        return None
    return sizes, strides, value.dtype, value.device, value.requires_grad


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _forms(result: Any, args: Sequence[Any]) -> Any:
    several = isinstance(result, tuple)
    results = result if several else (result,)
    if not all(isinstance(r, FakeTensor) and r.storage_offset() == 0 for r in results):
        return None
    mine = {r.untyped_storage()._cdata for r in results}
    given = {a.untyped_storage()._cdata for a in _tensors(args)}
    if len(mine) < len(results) or not mine.isdisjoint(given):
        return None  # a view of something
    forms = tuple(map(_form, results))
    return None if None in forms else (several, forms)
