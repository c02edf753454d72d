"""The self-test: whether a machine's versions, device and kernels do what this product needs, in one table.

The process that asks for it uses no device and imports neither torch nor Triton. What may end a process, or its use of
the device, happens in processes of its own, see `children`; their end is a row of the table.
"""
