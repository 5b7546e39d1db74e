"""What a training step of a site is made of, each part with a key of its own in the cost table.

    <direction>   the GEMM alone, operands quantised and laid out; our own kernel's whole chain
    quantise      an operand's FP8 form, for one GEMM or for two in one go; a cast to bf16
    epilogue      BlockNorm, gain, activation behind a GEMM that does not do them itself
    gradient      their gradient, in bf16 or, by our own kernel, as FP8 in both orientations
    widen         a handed e4m3 tensor back to the compute dtype
    bounded       what a norm that no GEMM takes in writes besides its result, as e4m3 with a static
                  scale, for all linears that read it

Priced apart, each is counted once however many directions need it. The parts that only move memory
are regular, and estimated once a few rows stand; GEMMs are not, and are timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loka_compile import _compat
from loka_compile.lowering import chain
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import bucket
from loka_compile.lowering.cost_table import dtype_name
from loka_compile.lowering.cost_table import version_of
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.epilogue import is_pointwise
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand

#: In a key's `epilogue`: the kernel alone. Our own kernel's is followed by what it hands on and by
#: its chain: `gemm>y8t+block_norm:256:hard_swish+gain`.
GEMM = "gemm"
QUANTISE, EPILOGUE, GRADIENT, WIDEN = "quantise", "epilogue", "gradient", "widen"
BOUNDED = "bounded"
#: Parts that move memory and compute next to nothing.
MEMORY_BOUND = (QUANTISE, EPILOGUE, GRADIENT, WIDEN, BOUNDED)

#: Rules of an operand for its two readers; None: that reader takes it in high precision, or ready.
Pair = tuple[Operand | None, Operand | None]

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """Where a kernel is to run: all that its price hangs on but the kernel and the direction.

    epilogue: text of the fused chain behind the GEMM, "" for none.
    """

    shape: GemmShape
    dtype: torch.dtype
    device: torch.device
    layout: str = "nk"
    epilogue: str = ""

    def key(self, direction: str, kernel: str, handed: bool = False) -> CostKey:
        """Of a direction as a whole: quantised from bf16 operands, with the epilogue or with its
        gradient before it."""
        m, k, n = self.shape.m, self.shape.k, self.shape.n
        # The gradient of an exact epilogue is the same code whatever kernel follows.
        alone = direction != "fwd" and is_pointwise(self.epilogue)
        return CostKey.of(
            kernel,
            direction,
            m,
            k,
            n,
            self.dtype,
            self.device,
            layout=self.layout,
            epilogue="" if alone else self.epilogue,
            handed=handed,
        )

    def gemm(self, direction: str, kernel: str, out: str = "y") -> CostKey:
        """Of the kernel alone. out: what our own kernel hands on (`chain_formulas.OUTPUTS`)."""
        if kernel != HIGH_PRECISION:
            library, recipe, emulated = split_kernel_name(kernel)
            kernel = kernel if emulated else library.priced_as(recipe, direction)
        m, k, n = self.shape.m, self.shape.k, self.shape.n
        epilogue = f"{GEMM}>{out}+{self.epilogue}" if chain.is_own(kernel) else GEMM
        # FP8 operands lie as the kernel wants them, whatever way the weight is stored.
        layout = self.layout if kernel == HIGH_PRECISION else "nk"
        return CostKey.of(
            kernel, direction, m, k, n, self.dtype, self.device, layout=layout, epilogue=epilogue
        )

    def quantise(self, tensor: str, rules: Pair) -> CostKey:
        """Of making `tensor` ("x", "w" or "gy") FP8 for its two readers: the one that contracts
        over its columns (fwd x, fwd w, dgrad gy) and the one that takes it transposed."""
        m, k, n = self.shape.m, self.shape.k, self.shape.n
        rows, columns = {"x": (m, k), "w": (n, k), "gy": (m, n)}[tensor]
        # A weight that both readers want is quantised by one kernel of ours (`weights.py`).
        both = all(rule is not None and rule.scaled for rule in rules)
        library = "loka" if tensor == "w" and both else "torch"
        if tensor == "w" and self.layout == "kn":
            rows, columns, rules = columns, rows, rules[::-1]
        return self._moving(QUANTISE, rows, columns, 0, library, spell_pair(rules))

    def epilogue_step(self) -> CostKey:
        return self._moving(EPILOGUE, self.shape.m, 0, self.shape.n, "torch", HIGH_PRECISION)

    @property
    def has_gradient(self) -> bool:
        """Its epilogue has a gradient that kernels do otherwise. That of an exact epilogue is the
        same code whatever kernel follows."""
        return bool(self.epilogue) and not is_pointwise(self.epilogue)

    @property
    def own_gradient(self) -> bool:
        """Our backward kernel can write it as FP8. What was added before the norm wants it too,
        in the compute dtype, which our kernel never writes."""
        return self.has_gradient and not self.epilogue.endswith("+add")

    def gradient(self, rules: Pair | None) -> CostKey:
        """Of dL/dy -> dL/dz: in the compute dtype, or quantised by our kernel for both readers."""
        library, recipe = (
            ("torch", HIGH_PRECISION) if rules is None else ("loka", spell_pair(rules))
        )
        return self._moving(GRADIENT, self.shape.m, 0, self.shape.n, library, recipe)

    def widen(self) -> CostKey:
        return self._moving(WIDEN, self.shape.m, self.shape.k, 0, "torch", HIGH_PRECISION)

    def bounded(self, turned: bool) -> CostKey:
        """Of what a norm writes for this site's input, see `loka::bounded_e4m3`: e4m3 and, with
        `turned`, its transpose for a wgrad."""
        out = "y8t" if turned else "y8"
        return self._moving(BOUNDED, self.shape.m, self.shape.k, 0, "torch", out)

    def _moving(self, what: str, rows: int, k: int, n: int, library: str, recipe: str) -> CostKey:
        return CostKey(
            device=_compat.device_key(self.device),
            direction=what,
            m=bucket(rows),
            k=k,
            n=n,
            dtype=dtype_name(self.dtype),
            library=library,
            recipe=recipe,
            version=version_of(library, what),
            torch=torch.__version__,
            epilogue=self.epilogue if what in (EPILOGUE, GRADIENT) else "",
        )


#: How wgrad finds x: in the compute dtype, as the transposed e4m3 copy that a producer wrote, or as
#: the producer's e4m3, which it has to widen again.
PLAIN, HANDED, WIDENED = "plain", "handed", "widened"


def forward_parts(place: Place, kernel: str, handed: bool = False) -> list[CostKey]:
    """What a forward is made of. handed: x comes as e4m3."""
    a, b = rules_of(kernel, "fwd")
    keys = [place.gemm("fwd", kernel)]
    keys += [place.quantise("w", (b, None))] if b is not None else []
    keys += [place.quantise("x", (a, None))] if a is not None and not handed else []
    if place.epilogue and not chain.is_own(kernel):
        keys.append(place.epilogue_step())
    return keys


def backward_parts(
    place: Place, direction: str, kernel: str, ready: bool = False, x: str = PLAIN
) -> list[CostKey]:
    """What dgrad or wgrad is made of, from dL/dz on. ready: dL/dz comes quantised."""
    a, b = rules_of(kernel, direction)
    keys = [place.gemm(direction, kernel)]
    if a is not None and not ready:
        keys.append(place.quantise("gy", (a, None) if direction == "dgrad" else (None, a)))
    if direction == "wgrad" and x == WIDENED:
        keys.append(place.widen())
    if b is not None and direction == "dgrad":
        keys.append(place.quantise("w", (None, b)))
    elif b is not None and x != HANDED:
        keys.append(place.quantise("x", (None, b)))
    return keys


def rules_of(kernel: str, direction: str) -> Pair:
    """How `kernel` reads its operands A and B; (None, None) for high precision."""
    if kernel == HIGH_PRECISION:
        return None, None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    return (None, None) if rule is None else (rule.a, rule.b)


def spell(rule: Operand | None) -> str:
    """`row.e4m3`; `none`."""
    if rule is None:
        return "none"
    return f"{rule.granularity.value}.{next(k for k, v in _FORMATS.items() if v == rule.dtype)}"


def spell_pair(rules: Pair) -> str:
    return f"{spell(rules[0])}-{spell(rules[1])}"


def parse_pair(text: str) -> Pair:
    """The inverse of `spell_pair`. Raises ValueError for what it did not write."""
    found: list[Operand | None] = []
    for one in text.split("-"):
        if one == "none":
            found.append(None)
            continue
        granularity, _, name = one.partition(".")
        if name not in _FORMATS:
            raise ValueError(f"unknown rule {one!r}")
        found.append(Operand(Granularity(granularity), _FORMATS[name]))
    if len(found) != 2:
        raise ValueError(f"want two rules, got {text!r}")
    return found[0], found[1]


def is_gemm(key: CostKey) -> bool:
    """The key is a kernel's alone."""
    return key.direction in DIRECTIONS and key.epilogue.startswith(GEMM)


def out_of(key: CostKey) -> tuple[str, str]:
    """(what our own kernel hands on, its chain) of a `gemm` key; ("", "") for a bare GEMM."""
    head, _, epilogue = key.epilogue.partition("+")
    return head.partition(">")[2], epilogue


#: Microseconds of a launch, and bytes per microsecond, where no rows say better.
_LAUNCH_US = 1.5
_BYTES_PER_US = 3e6


def guess_us(key: CostKey, itemsize: int) -> float:
    """A memory-bound part by the bytes that it moves: what stands before anything was measured."""
    elements = key.m * max(key.k, key.n)
    if key.direction == WIDEN:
        launches, per_element = 1, 1 + itemsize
    elif key.direction == EPILOGUE:
        # Reads z and what is added or multiplied; writes y and, of a norm, u.
        form = Epilogue.parse(key.epilogue)
        assert form is not None, key
        moved = 2 + form.operands if isinstance(form, Pointwise) else 3 + form.add
        launches, per_element = 1, moved * itemsize
    elif key.direction == BOUNDED:
        # The norm's own kernel writes the one; the transpose is a kernel that reads again.
        launches, per_element = (1, 2 + itemsize) if key.recipe == "y8t" else (0, 1)
    elif key.direction == GRADIENT and key.recipe == HIGH_PRECISION:
        launches, per_element = 1, 3 * itemsize
    else:
        pair = parse_pair(key.recipe)
        rules = [rule for rule in pair if rule is not None]
        sources = 2 * itemsize if key.direction == GRADIENT else itemsize
        # A row of its own columns is found and cast in one look; any other amax comes first.
        turned = pair[1] is not None and pair[1].scaled
        first = turned or any(r.granularity is Granularity.TENSOR for r in rules)
        looks = 2 if first or key.direction == GRADIENT else 1
        written = sum(rule.dtype.itemsize for rule in rules)
        launches, per_element = looks, looks * sources + written
    return launches * _LAUNCH_US + elements * per_element / _BYTES_PER_US
