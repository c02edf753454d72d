"""Ascend's compiler in an environment of its own, asked through a worker process."""
