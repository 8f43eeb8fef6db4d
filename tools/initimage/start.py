"""Entry of the wrapper inside a pod."""

import sys

from bootseer.cli.main import main

sys.exit(main())
