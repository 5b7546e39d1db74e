"""Reference models, written the way users write them."""

from __future__ import annotations

from loka_compile.zoo.dcn_v2 import DCNv2
from loka_compile.zoo.dhen import DHEN
from loka_compile.zoo.dlrm import DLRM
from loka_compile.zoo.elfm import ELFM
from loka_compile.zoo.embeddings import EmbeddingCollection
from loka_compile.zoo.interformer import InterFormer
from loka_compile.zoo.recommender import History
from loka_compile.zoo.recommender import Recommender
from loka_compile.zoo.registry import MODELS
from loka_compile.zoo.registry import build_model
from loka_compile.zoo.wukong import SCALES
from loka_compile.zoo.wukong import Wukong
from loka_compile.zoo.wukong import WukongConfig
from loka_compile.zoo.wukong import WukongDense

__all__ = [
    "DHEN",
    "DLRM",
    "ELFM",
    "MODELS",
    "SCALES",
    "DCNv2",
    "EmbeddingCollection",
    "History",
    "InterFormer",
    "Recommender",
    "Wukong",
    "WukongConfig",
    "WukongDense",
    "build_model",
]
