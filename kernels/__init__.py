"""Device code of the gated delta rule: Triton kernels and the tile choice, nothing of the host."""
