"""The namespace `loka::`, as a `torch.library.Library`: `@custom_op` costs twice the host time."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("loka", "FRAGMENT")
