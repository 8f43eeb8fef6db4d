"""The event writer under its former name, for programs that import it from here."""

import sys

from bootseer import events

sys.modules[__name__] = events
