"""A chain: an op whose candidates run other ops as their stages, forward and backward."""
