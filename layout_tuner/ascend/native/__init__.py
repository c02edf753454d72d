"""Compiled kernels, built for this CPU and run."""
