"""Our own Python, started again for a module of ours."""

from __future__ import annotations

import os
import sys

_BOOT = (
    "import sys; places, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "sys.path[:] = places.split('\\n'); "
    "sys.exit(__import__(module, fromlist=['main']).main())"
)


def command_for(module: str, *arguments: str) -> list[str]:
    """The command line that runs `main()` of a module, its arguments in `sys.argv[1:]`.

    Isolated (-I): PYTHONHOME, PYTHONPATH and the like are the job's. Modules are looked for where
    this process does, but last in the folder that `python -m` put first: a job's own, which may
    hold a `json.py`.
    """
    places = list(sys.path)
    if not sys.flags.safe_path:
        places.append(places.pop(0))
    package_parent = os.path.abspath(__file__)
    for _ in range(3):
        package_parent = os.path.dirname(package_parent)
    places = list(dict.fromkeys([*filter(os.path.isabs, places), package_parent]))
    return [sys.executable, "-I", "-c", _BOOT, "\n".join(places), module, *arguments]
