"""Questions to the device, Triton's interpreter on a machine without one, and the environment that timings hold in."""
