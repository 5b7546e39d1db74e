"""The epilogue of a fused site as text, in cost keys.

block_norm:256:hard_swish+gain+gate     BlockNorm and an activation
pointwise:silu+bias+add                 exact: bias, factor, addend, activation
"""

from __future__ import annotations

from dataclasses import dataclass

from loka_compile.lowering.chain_formulas import ACTIVATIONS
from loka_compile.lowering.pointwise import ACTS

_FLAGS = ("gain", "gate", "add")
_MULS = ("mul", "scale")


@dataclass(frozen=True)
class Epilogue:
    """What runs behind the GEMM: BlockNorm over `block` features, gain, activation, gate form; with
    `add`, behind a sum."""

    block: int
    act: str = "none"
    gain: bool = False
    gate: bool = False
    add: bool = False

    def __str__(self) -> str:
        flags = "".join(f"+{name}" for name in _FLAGS if getattr(self, name))
        return f"block_norm:{self.block}:{self.act}{flags}"

    @classmethod
    def parse(cls, text: str) -> Epilogue | Pointwise | None:
        """None for "", the bare GEMM. Raises ValueError for what is no epilogue."""
        if not text:
            return None
        if is_pointwise(text):
            return Pointwise.parse(text)
        head, *flags = text.split("+")
        name, _, rest = head.partition(":")
        block, _, act = rest.partition(":")
        if name != "block_norm" or act not in ACTIVATIONS or not set(flags) <= {*_FLAGS}:
            raise ValueError(f"unknown epilogue {text!r}")
        return cls(int(block), act, *(name in flags for name in _FLAGS))


@dataclass(frozen=True)
class Pointwise:
    """act((x @ w.T + bias) * mul + addend). mul: "" none, "mul" by element, "scale" one scalar."""

    act: str = "none"
    bias: bool = False
    mul: str = ""
    add: bool = False

    def __str__(self) -> str:
        flags = ["bias"] * self.bias + [self.mul] * bool(self.mul) + ["add"] * self.add
        return "+".join([f"pointwise:{self.act}", *flags])

    @property
    def operands(self) -> int:
        """(M, N) operands that the epilogue reads."""
        return (self.mul == "mul") + self.add

    @classmethod
    def parse(cls, text: str) -> Pointwise:
        head, *flags = text.split("+")
        name, _, act = head.partition(":")
        if name != "pointwise" or act not in ACTS or not set(flags) <= {"bias", *_MULS, "add"}:
            raise ValueError(f"unknown epilogue {text!r}")
        mul = next((f for f in flags if f in _MULS), "")
        return cls(act, "bias" in flags, mul, "add" in flags)


def is_pointwise(text: str) -> bool:
    """Exact, and of the forward alone: the backward of a pointwise part is compiled as it is."""
    return text.startswith("pointwise:")
