"""The epilogue of a fused site as text, in cost keys: `block_norm:256:hard_swish+gain+gate`."""

from __future__ import annotations

from dataclasses import dataclass

from loka_compile.lowering.formulas import ACTIVATIONS


@dataclass(frozen=True)
class Epilogue:
    """What runs behind the GEMM: BlockNorm over `block` features, gain, activation, gate form."""

    block: int
    act: str = "none"
    gain: bool = False
    gate: bool = False

    def __str__(self) -> str:
        flags = ("+gain" if self.gain else "") + ("+gate" if self.gate else "")
        return f"block_norm:{self.block}:{self.act}{flags}"

    @classmethod
    def parse(cls, text: str) -> Epilogue | None:
        """None for "", the bare GEMM. Raises ValueError for what is no epilogue."""
        if not text:
            return None
        head, *flags = text.split("+")
        name, _, rest = head.partition(":")
        block, _, act = rest.partition(":")
        if name != "block_norm" or act not in ACTIVATIONS or not set(flags) <= {"gain", "gate"}:
            raise ValueError(f"unknown epilogue {text!r}")
        return cls(int(block), act, "gain" in flags, "gate" in flags)
