"""Ascend's own compiler, without an NPU: lowering, facts of the compiled kernel, native execution, prediction."""
