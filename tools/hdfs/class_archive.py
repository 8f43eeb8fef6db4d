"""Hadoop's classes as Java has them in memory, kept in one file: a JVM maps it as it starts.

Half of what a server's start costs is to read, check and lay out five thousand classes. Java
keeps the result of that for the classes of a list (class data sharing). The archive is good for
one build of Java and for unchanged jars, whence its name; a class that it lacks comes from its jar
as ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tools.hdfs.jars import classpath, jars_folder

MAKING_S = 300.0


def options() -> tuple[str, ...]:
    """Java's options to use the archive; none where none was made for this Java and these jars.

    The class path has to begin with `jars.classpath()`.
    """
    made = place()
    return (f"-XX:SharedArchiveFile={made}",) if made.exists() else ()


def recording(folder: Path) -> tuple[str, ...]:
    """Java's options to list the classes that a process loads, in a file of `folder`."""
    return (f"-XX:DumpLoadedClassList={folder}/%p.classes",)


def place() -> Path:
    """Where the archive for this Java and these jars is, or would be."""
    folder = jars_folder()
    state = hashlib.sha256(_java_build())
    for jar in sorted(folder.glob("*.jar")):
        status = jar.stat()  # Java looks at these too
        state.update(f"{jar} {status.st_size} {status.st_mtime_ns}\n".encode())
    return folder.parent / f"{folder.name}-{state.hexdigest()[:12]}.jsa"


def write(lists: Iterable[Path], scratch: Path) -> None:
    """Make the archive of all listed classes. Raises RuntimeError with Java's output."""
    lines = {line for path in lists for line in path.read_text().splitlines(keepends=True)}
    merged, made = scratch / "classes", scratch / "archive"
    merged.write_text("".join(sorted(lines)), encoding="utf-8")
    command = [
        *("java", "-Xshare:dump", "-XX:+UseG1GC"),  # another collector leaves the heap's part out
        *(f"-XX:SharedClassListFile={merged}", f"-XX:SharedArchiveFile={made}"),
        *("-cp", classpath()),
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=MAKING_S,
    )
    if done.returncode or not made.exists():
        raise RuntimeError(f"Java did not archive Hadoop's classes:\n{done.stdout[-4000:]}")
    target = place()
    with (target.parent / f"{jars_folder().name}.jsa.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for old in target.parent.glob(f"{jars_folder().name}-*.jsa"):
            old.unlink()  # running processes keep what they have mapped
        os.rename(made, target)


def _java_build() -> bytes:
    """What tells one build of Java from another."""
    java = shutil.which("java")
    if java is None:
        raise RuntimeError("there is no `java` on PATH: install openjdk-17-jre-headless")
    home = Path(java).resolve().parent.parent
    library = home / "lib/server/libjvm.so"
    # A script that starts some Java tells no build; Java refuses an archive of another one.
    status = (library if library.exists() else Path(java)).stat()
    return f"{home} {status.st_size} {status.st_mtime_ns}\n".encode()
