"""Model names -> classes, and models made for a data source."""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from loka_compile.zoo.dcn_v2 import DCNv2
from loka_compile.zoo.dhen import DHEN
from loka_compile.zoo.dlrm import DLRM
from loka_compile.zoo.elfm import ELFM
from loka_compile.zoo.interformer import InterFormer
from loka_compile.zoo.recommender import History
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.recommender import pick
from loka_compile.zoo.wukong import Wukong

if TYPE_CHECKING:
    from loka_compile.data.base import Schema

MODELS: dict[str, type[Recommender]] = {
    "wukong": Wukong,
    "dcn_v2": DCNv2,
    "dlrm": DLRM,
    "dhen": DHEN,
    "interformer": InterFormer,
    "elfm": ELFM,
}


def build_model(
    name: str, scale: str, schema: Schema, *, sparse: bool = True, **tables: Any
) -> Recommender:
    """Model ``name`` at ``scale`` for rows of ``schema``; weights from torch's generator.

    Tables have sparse gradients unless told otherwise. Raises ValueError, with the known names,
    for an unknown model or scale, and for a source without histories where the model needs them.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; use one of {', '.join(MODELS)}")
    kind = MODELS[name]
    cfg = pick(kind.scales, scale)
    history = None
    if kind.uses_history:
        if schema.history is None:
            raise ValueError(
                f"{name} reads a history, and this data has none; open it with "
                "history='KEY>ITEM', two of its id fields"
            )
        history = History(schema.index(schema.history.field), schema.history.length)
    return kind(
        cfg,
        schema.cardinalities,
        len(schema.dense),
        sparse=sparse,
        history=history,
        **tables,
    )
