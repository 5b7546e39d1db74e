"""Kernels, each beside its plain-torch `*_ref`."""
