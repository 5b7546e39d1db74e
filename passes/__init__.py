"""Graph -> graph, one file each, on torch-level FX graphs as Dynamo hands them over."""

# Passes name `torch.ops.loka.*`: importing the ops first makes those names exist.
from loka_compile.lowering import ops as _ops  # noqa: F401
