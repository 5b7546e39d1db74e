"""`_compat.register_fake` registers what torch would, without a walk over all loaded modules."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._library import utils

from loka_compile import _compat
from loka_compile.lowering.library import LIBRARY


def test_the_fake_is_in_force_and_torch_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = utils.get_source
    monkeypatch.setattr(inspect, "getframeinfo", lambda *_: pytest.fail("looked a line up"))
    LIBRARY.define("test_register_fake(Tensor x) -> Tensor")

    @_compat.register_fake("loka::test_register_fake", LIBRARY)
    def _(x):
        return x.new_empty((7,))

    assert utils.get_source is asked
    with torch._subclasses.FakeTensorMode():
        made = torch.ops.loka.test_register_fake(torch.empty(3))
    assert made.shape == (7,)
