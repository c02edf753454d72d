"""Many ranks, one decision: the ranks of a torch.distributed group share out keys, and follow the same outcome."""
