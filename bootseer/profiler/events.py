"""The event writer under its former name, for programs that import it from here."""

import sys

from bootseer import events
from bootseer.events import *  # noqa: F403 - what type checkers see

sys.modules[__name__] = events
