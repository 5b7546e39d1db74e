"""Every launch of a test of kernels is held against the earlier ones of its key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import kind

#: (launcher, key) -> what it was compiled for.
_FIRST: dict[tuple[int, Any], tuple] = {}


def _specialised(args: Any, constants: dict[str, Any], options: dict[str, Any]) -> tuple:
    """What a compiled kernel is good for: types, alignment, kinds of integers, constants."""
    of_args = tuple(
        (a.dtype, a.data_ptr() % 16 == 0)
        if isinstance(a, torch.Tensor)
        else kind(a)
        if isinstance(a, int)
        else type(a)
        for a in args
    )
    return of_args, tuple(constants.items()), tuple(options.items())


@pytest.fixture(autouse=True)
def _keys_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled for one key runs for it ever after: the key must settle the rest.

    The interpreter compiles nothing and so would show nothing of a key that says too little.
    """
    launch = Launcher.__call__

    def checked(self, key, grid, args, constants, device, **options):
        now = _specialised(args, constants, options)
        first = _FIRST.setdefault((id(self), key), now)
        assert now == first, f"{self.kernel}: one key for two kernels"
        return launch(self, key, grid, args, constants, device, **options)

    monkeypatch.setattr(Launcher, "__call__", checked)
