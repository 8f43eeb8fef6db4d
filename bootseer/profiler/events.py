"""The event writer under its former name, for programs that import it from here."""

import sys

from bootseer.events import writer

sys.modules[__name__] = writer
