"""Decision files between machines: exports, merges, pins, and what is wrong with one."""
