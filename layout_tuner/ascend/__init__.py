"""Ascend's own compiler, without an NPU: lowering, counts of the compiled kernel, native execution, prediction."""
