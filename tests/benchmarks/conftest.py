"""Benchmarks are scripts that import each other by name; their tests have to find them, too."""

import sys

from tests.harness import ROOT

sys.path.append(str(ROOT / "benchmarks"))
