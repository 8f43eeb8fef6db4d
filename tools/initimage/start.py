#!/opt/bootseer/python/bin/python3 -I
"""Entry of the wrapper inside a pod, and its `bootseer` once it is there as a whole."""

import sys

from bootseer.__main__ import main

sys.exit(main())
