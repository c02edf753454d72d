"""Findings of each rule over a library, and how long they took.

python bench/lint.py fla                       # an installed package, a folder or files
python bench/lint.py fla --sample 60           # and 60 findings to judge by hand, spread over the rules
"""

import argparse
import random
import time
from collections import Counter
from pathlib import Path

from layout_tuner.lint import RULES, lint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--sample", type=int, default=0, help="findings to print, drawn with a fixed seed")
    options = parser.parse_args()
    start, cpu_start = time.perf_counter(), time.process_time()
    report = lint(options.paths)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    counts = Counter(finding.rule for finding in report.findings)
    for rule in RULES.values():
        print(f"{rule.id} {counts[rule.id]:6} {rule.title}")
    print(f"{len(report.findings)} findings in {report.files} files, {seconds:.2f} s, {cpu_s:.2f} s of CPU")
    draw = random.Random(0)
    by_rule = {rule: [each for each in report.findings if each.rule == rule] for rule in counts}
    chosen = []
    for each in by_rule.values():
        draw.shuffle(each)
    while len(chosen) < options.sample and any(by_rule.values()):
        chosen += [each.pop() for each in by_rule.values() if each][: options.sample - len(chosen)]
    for each in sorted(chosen, key=lambda finding: (finding.rule, finding.path, finding.line)):
        lines = Path(each.path).read_text().splitlines()
        print(f"\n{each.rule} {each.path}:{each.line} [{each.function}] {each.message}")
        print("    " + "\n    ".join(line.strip() for line in lines[each.line - 1 : min(each.end_line, each.line + 3)]))


if __name__ == "__main__":
    main()
