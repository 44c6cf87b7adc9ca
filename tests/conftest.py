"""What all tests share: several logical CPUs, asked for before the first is used, and no choices
that were stored on this machine."""

import os
import signal
import sys

from allreduce.devices import set_logical_devices

set_logical_devices("CPU", 4)
os.environ["ALLREDUCE_CHOICES"] = "built-in"
# Whoever ends a run of tests ends what they have started, too.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
# What a shell starts in its background ignores what Ctrl-C sends; what tests start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
