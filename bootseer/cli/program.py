# For copies of scripts/bootseer-python that an earlier version installed: they import this.
from bootseer.__main__ import main as main
