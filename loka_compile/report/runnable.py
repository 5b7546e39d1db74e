"""A graph's canonical text -> a Python file that runs on inputs that it makes up.

The text itself stays as it is: the file only puts a header before it, which imports what the text
names, and a `main` behind it, which makes inputs of the shapes and dtypes in the text's comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Value of a size that the compile left open, where the file is run as it is.
OPEN_SIZE = 7

_HEADER = '''"""{title}

Run it: the inputs are made up, the shapes and dtypes are those of the compile.
"""

import builtins
import operator
from math import inf, nan
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import loka_compile.backend  # defines the loka:: ops

device = torch.device
{namespaces}

class _Bodies:
    """Higher-order ops on plain functions: a checkpointed body is called, others are torch's."""

    def __getattr__(self, name):
        if "checkpoint" in name or name in ("wrap", "invoke_subgraph"):
            return lambda body, *args, **_: body(*[a for a in args if not isinstance(a, str)])
        return getattr(torch.ops.higher_order, name)


higher_order = _Bodies()
{sizes}{modules}
'''

_MAIN = '''

def inputs():
    """One made-up value per argument of `forward`."""
    torch.manual_seed(0)
    return [
{inputs}
    ]


def main():
    torch.set_default_device({device})
{constants}    results = forward(*inputs())
    for i, y in enumerate(results if isinstance(results, (list, tuple)) else [results]):
        shown = f"{{y.dtype}} {{list(y.shape)}}" if isinstance(y, torch.Tensor) else repr(y)
        print(f"result {{i}}: {{shown}}")


if __name__ == "__main__":
    main()
'''

_ARGUMENT = re.compile(r"^    (\w+),  # (.*)$")
_TENSOR = re.compile(r"^(\w+)\[(.*)\]$")
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


def program(text: str, title: str, device: str = "") -> str:
    """`text` (see `graph_text.text_of`) as a file. device: where the graph ran; "" for the CPU."""
    head = text.split("):\n", 1)[0]
    arguments = [m.groups() for m in map(_ARGUMENT.match, head.splitlines()) if m]
    device = device.partition(":")[0] or "cpu"
    return (
        _HEADER.format(
            title=title.replace('"', "'"),
            namespaces="\n".join(f"{n} = torch.ops.{n}" for n in _namespaces(text)),
            sizes="".join(f"{s} = {OPEN_SIZE}\n" for s in _sizes(a[1] for a in arguments)),
            modules="".join(f"import {m}\n" for m in _modules(text)),
        )
        + "\n"
        + text.rstrip()
        + "\n"
        + _MAIN.format(
            inputs="\n".join(
                f"        {_input(*argument)},  # {argument[0]}" for argument in arguments
            ),
            constants=_constants(text),
            device=f'"{device}"' if device == "cpu" else _where_there_is(device),
        )
    )


def _where_there_is(device: str) -> str:
    return f'"{device}" if torch.{device}.is_available() else "cpu"'


def _input(name: str, kind: str) -> str:
    made = _made_up(kind)
    # State of the Probe starts at zero: random counts would point outside its rows.
    return made.replace("torch.randn(", "torch.zeros(") if name.startswith("loka_probe") else made


def _made_up(kind: str) -> str:
    found = _TENSOR.match(kind)
    if found is None:
        symbol = re.match(r"Sym(?:Int|Float|Bool) (.*)", kind)
        if symbol is not None:
            return "1.0" if "SymFloat" in kind else symbol[1]
        return {"int": "1", "float": "1.0", "bool": "True"}.get(kind, "None")
    dtype, shape = found.groups()
    size = f"({shape}{',' if shape and ',' not in shape else ''})"
    if re.match(r"u?int|bool", dtype):
        # Zeros are valid as indices too.
        return f"torch.zeros({size}, dtype=torch.{dtype})"
    wide = dtype if dtype in ("float32", "float64") else "float32"
    made = f"torch.randn({size}, dtype=torch.{wide})"
    return made if wide == dtype else f"{made}.to(torch.{dtype})"


def _sizes(kinds: Iterator[str]) -> list[str]:
    found: dict[str, None] = {}
    for kind in kinds:
        tensor = _TENSOR.match(kind)
        where = tensor[2] if tensor else kind.partition(" ")[2] if kind.startswith("Sym") else ""
        found.update(dict.fromkeys(_SYMBOL.findall(where)))
    return list(found)


def _calls(text: str) -> Iterator[str]:
    """Dotted names that are called: `F.linear`, `loka.linear.default`, `my.module.function`."""
    for line in text.splitlines():
        found = re.match(r"    \w+ = ([A-Za-z_][\w.]*)\(", line)
        if found is not None:
            yield found[1]


def _arguments(text: str) -> set[str]:
    return set(re.findall(r"^    (\w+)(?:,  #| = )", text, re.M))


def _namespaces(text: str) -> list[str]:
    """Op libraries that overloads come from: `loka` of `loka.linear.default`."""
    known = {"F", "torch", "operator", "builtins", "higher_order", "self", *_arguments(text)}
    heads = (c.split(".") for c in _calls(text))
    return sorted({p[0] for p in heads if len(p) == 3 and p[0] not in known and _is_library(p[0])})


def _is_library(name: str) -> bool:
    import torch

    return bool(list(getattr(torch.ops, name))) or name in ("aten", "prims")


def _modules(text: str) -> list[str]:
    """Modules of the user's own functions."""
    known = {"F", "torch", "operator", "builtins", "higher_order", "self", *_namespaces(text)}
    own = {c for c in _calls(text) if "." in c and c.split(".")[0] not in known | _arguments(text)}
    return sorted({c.rpartition(".")[0] for c in own})


def _constants(text: str) -> str:
    """Tensors that the graph holds itself, by name."""
    found = dict(re.findall(r"= self\.(\w+)  # ([a-z]\w*\[[^\]]*\])", text))
    if not found:
        return ""
    made = ", ".join(f"{name}={_made_up(kind)}" for name, kind in found.items())
    return f"    global self\n    self = SimpleNamespace({made})\n"
