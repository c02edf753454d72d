"""The chain of ops that makes up the gated delta rule, forward and backward."""
