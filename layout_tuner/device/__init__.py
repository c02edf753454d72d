"""The device: its driver, Triton's interpreter in its place, and the environment timings hold in."""
