"""The settings of writing under their former name, for pickles that earlier versions made."""

from bootseer.stripedfs.write.write_settings import WriteSettings

__all__ = ["WriteSettings"]
