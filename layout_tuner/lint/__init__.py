"""What is known to be slow or wrong on an Ascend NPU, found in the text of Triton kernels.

Only syntax trees are looked at: nothing that is read is imported, and neither torch nor Triton is needed.
"""

from .findings import RULES, Finding, Rule
from .linting import Report, lint

__all__ = ["RULES", "Finding", "Report", "Rule", "lint"]
