"""Reference models, written the way users write them."""

from __future__ import annotations

from loka_compile.zoo.embeddings import EmbeddingCollection
from loka_compile.zoo.wukong import SCALES
from loka_compile.zoo.wukong import Wukong
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

__all__ = ["SCALES", "EmbeddingCollection", "Wukong", "WukongConfig", "WukongDense"]
