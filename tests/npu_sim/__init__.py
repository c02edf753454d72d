"""A simulated `npu` device for tests: `npu_sim.sim` installs and steers it."""
