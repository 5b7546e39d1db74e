"""Commands of `loka` that have a module of their own; `loka_compile.cli` registers them."""
