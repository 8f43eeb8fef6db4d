"""The fsspec file system under its former name, for programs that import it from here."""

from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.fsspec_face.register import register

__all__ = ["StripedFileSystem", "register"]
