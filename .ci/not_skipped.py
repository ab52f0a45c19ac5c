"""Fail unless every suite named on the command line has a passed test in a JUnit report.

Run: ``python .ci/not_skipped.py junit.xml tests.cluster tests.distributed``
"""

import sys
import xml.etree.ElementTree as ET


def main(report: str, *suites: str) -> int:
    """Return 1 and say which suites did not run."""
    passed = [
        case.get("classname", "")
        for case in ET.parse(report).iter("testcase")
        if not any(case.find(tag) is not None for tag in ("skipped", "failure", "error"))
    ]
    idle = [suite for suite in suites if not any(name.startswith(f"{suite}.") for name in passed)]
    for suite in idle:
        print(f"ci: no test of {suite} ran", file=sys.stderr)
    return 1 if idle else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
