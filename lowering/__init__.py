"""GEMM site -> kernel: the `loka::` ops, recipes, libraries, the accuracy gate and the choice."""
