"""The compiler's modules in MLIR's generic form: parsed, and walked operation by operation."""
