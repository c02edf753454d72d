"""Imported ahead of torch and of every kernel: where those cannot be imported, says why and what to do."""

from . import installation

installation.require_kernels()
