"""`--mods` and `--keep` of the commands that train or plan with the Mods on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from typing import Any

import typer

Mods = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated, of no_bias, block_norm, hard_swish: only these Mods, where an arm "
        "has any; all when left out."
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="Layers of the dense part that a Mod leaves as written: no_bias=mlp.0, or a pattern; "
        "repeat it for more.",
        metavar="MOD=LAYER",
    ),
]


def options_of(mods: str | None, keep: Sequence[str] | None) -> dict[str, Any]:
    """The backend's options of those names, as far as they were given. Raises BadOptionError."""
    from loka_compile.errors import BadOptionError
    from loka_compile.mod_set import parse_keep
    from loka_compile.mod_set import parse_mods

    options: dict[str, Any] = {}
    if mods is not None:
        names = [name.strip() for name in mods.split(",") if name.strip()]
        options["mods"] = parse_mods(mods if mods in ("on", "off") else names, ("on", "off"))
    patterns: dict[str, list[str]] = {}
    for one in keep or ():
        mod, equals, layer = one.partition("=")
        if not (equals and layer):
            raise BadOptionError("keep", one, "MOD=LAYER, for instance no_bias=mlp.0")
        patterns.setdefault(mod.strip(), []).append(layer.strip())
    if patterns:
        options["keep"] = parse_keep(patterns)
    return options
