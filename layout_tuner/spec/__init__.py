"""What can be asked of the kernels: ops, declared, with their keys, layouts and shapes."""
