"""The fsspec file system under its former name, for programs that import it from here."""

import sys

from bootseer.stripedfs.fsspec_face import filesystem

sys.modules[__name__] = filesystem
