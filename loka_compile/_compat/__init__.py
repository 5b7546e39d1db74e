"""Every question about a torch, triton or library version, with its range and removal condition."""

from loka_compile._compat.autograd import autocast_state
from loka_compile._compat.autograd import backward_number
from loka_compile._compat.autograd import compiles_backwards
from loka_compile._compat.autograd import guard_backward
from loka_compile._compat.autograd import in_backward
from loka_compile._compat.autograd import in_functorch
from loka_compile._compat.autograd import is_compiled_backward
from loka_compile._compat.autograd import keeping_graphs
from loka_compile._compat.autograd import outside_modes
from loka_compile._compat.autograd import restore_autocast
from loka_compile._compat.autograd import saved_tensors_are_hooked
from loka_compile._compat.autograd import saved_tensors_unhooked
from loka_compile._compat.autograd import set_versions_to_zero
from loka_compile._compat.devices import await_stream
from loka_compile._compat.devices import delay_device
from loka_compile._compat.devices import device_key
from loka_compile._compat.devices import multiprocessors
from loka_compile._compat.devices import tf32_allowed
from loka_compile._compat.devices import why_no_bf16
from loka_compile._compat.devices import why_no_block_scaled_mm
from loka_compile._compat.devices import why_no_fp8
from loka_compile._compat.devices import why_no_scaled_mm_rowwise
from loka_compile._compat.devices import why_no_triton
from loka_compile._compat.dynamo import dynamo_control_flow
from loka_compile._compat.dynamo import late_compile
from loka_compile._compat.dynamo import real_inputs
from loka_compile._compat.dynamo import source_name
from loka_compile._compat.dynamo import spell_attributes
from loka_compile._compat.fakes import count_guards
from loka_compile._compat.fakes import graph_module
from loka_compile._compat.fakes import is_fake
from loka_compile._compat.fakes import new_fake
from loka_compile._compat.fakes import plain_dispatch
from loka_compile._compat.fakes import register_fake
from loka_compile._compat.fakes import size_hint
from loka_compile._compat.inductor import install_decompositions
from loka_compile._compat.inductor import join_graph_passes
from loka_compile._compat.inductor import missing_decompositions
from loka_compile._compat.launching import DirectLaunch
from loka_compile._compat.launching import direct_launch
from loka_compile._compat.processes import compile_in_processes
from loka_compile._compat.processes import default_store
from loka_compile._compat.sharding import Gathered
from loka_compile._compat.sharding import gathered
from loka_compile._compat.sharding import gathered_of
from loka_compile._compat.versions import TORCH
from loka_compile._compat.versions import why_wrong_pairing

__all__ = [
    "TORCH",
    "DirectLaunch",
    "Gathered",
    "autocast_state",
    "await_stream",
    "backward_number",
    "compile_in_processes",
    "compiles_backwards",
    "count_guards",
    "default_store",
    "delay_device",
    "device_key",
    "direct_launch",
    "dynamo_control_flow",
    "gathered",
    "gathered_of",
    "graph_module",
    "guard_backward",
    "in_backward",
    "in_functorch",
    "install_decompositions",
    "is_compiled_backward",
    "is_fake",
    "join_graph_passes",
    "keeping_graphs",
    "late_compile",
    "missing_decompositions",
    "multiprocessors",
    "new_fake",
    "outside_modes",
    "plain_dispatch",
    "real_inputs",
    "register_fake",
    "restore_autocast",
    "saved_tensors_are_hooked",
    "saved_tensors_unhooked",
    "set_versions_to_zero",
    "size_hint",
    "source_name",
    "spell_attributes",
    "tf32_allowed",
    "why_no_bf16",
    "why_no_block_scaled_mm",
    "why_no_fp8",
    "why_no_scaled_mm_rowwise",
    "why_no_triton",
    "why_wrong_pairing",
]
