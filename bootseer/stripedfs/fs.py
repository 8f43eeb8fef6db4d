"""The fsspec file system under its former name, for programs that import it from here."""

from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem, _Reopen
from bootseer.stripedfs.fsspec_face.register import register
from bootseer.stripedfs.fsspec_face.write_file import UnsupportedModeError
from bootseer.stripedfs.write.write_settings import WriteSettings

# Pickles of open files that earlier versions made name `_Reopen` here.
__all__ = [
    "StripedFileSystem",
    "UnsupportedModeError",
    "WriteSettings",
    "_Reopen",
    "register",
]
