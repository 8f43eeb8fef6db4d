"""The FUSE protocol against the C header of this machine."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from bootseer.fuse.protocol import replies, requests
from bootseer.fuse.protocol.requests import Layout, Opcode

LAYOUTS = {
    value.name: value
    for module in (requests, replies)
    for value in vars(module).values()
    if isinstance(value, Layout)
}

CONSTANTS = {
    **{f"FUSE_{opcode.name}": int(opcode) for opcode in Opcode},
    **{f"FATTR_{n}": getattr(requests, f"FATTR_{n}") for n in ("MODE", "UID", "GID", "SIZE")},
    "FUSE_GETATTR_FH": requests.GETATTR_FH,
    "FOPEN_DIRECT_IO": replies.FOPEN_DIRECT_IO,
    "FOPEN_KEEP_CACHE": replies.FOPEN_KEEP_CACHE,
    "FOPEN_NOFLUSH": replies.FOPEN_NOFLUSH,
    "FUSE_ASYNC_READ": replies.ASYNC_READ,
    "FUSE_ATOMIC_O_TRUNC": replies.ATOMIC_O_TRUNC,
    "FUSE_BIG_WRITES": replies.BIG_WRITES,
    "FUSE_DO_READDIRPLUS": replies.DO_READDIRPLUS,
    "FUSE_READDIRPLUS_AUTO": replies.READDIRPLUS_AUTO,
    "FUSE_ASYNC_DIO": replies.ASYNC_DIO,
    "FUSE_PARALLEL_DIROPS": replies.PARALLEL_DIROPS,
    "FUSE_MAX_PAGES": replies.MAX_PAGES,
    "FUSE_CACHE_SYMLINKS": replies.CACHE_SYMLINKS,
    "FUSE_HANDLE_KILLPRIV_V2": replies.HANDLE_KILLPRIV_V2,
    "FUSE_INIT_EXT": replies.INIT_EXT,
}


@pytest.mark.debian("gcc")
def test_layouts_are_those_of_the_c_header(tmp_path: Path) -> None:
    lines = []
    for layout in LAYOUTS.values():
        lines.append(f'P("{layout.name} %zu", sizeof(struct {layout.name}));')
        for field, _ in layout.fields:
            if not field.startswith("_"):
                where = f"offsetof(struct {layout.name}, {field})"
                lines.append(f'P("{layout.name}.{field} %zu", {where});')
    lines += [f'P("{name} %zu", (size_t){name});' for name in CONSTANTS]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/fuse.h>\n"
        '#define P(format, value) printf(format "\\n", value)\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    program = tmp_path / "layout"
    subprocess.run(["gcc", "-o", program, source], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    theirs = dict(line.split() for line in said.splitlines())
    ours = {name: str(value) for name, value in CONSTANTS.items()}
    for layout in LAYOUTS.values():
        ours[layout.name] = str(layout.struct.size)
        offset = 0
        for field, code in layout.fields:
            if not field.startswith("_"):
                ours[f"{layout.name}.{field}"] = str(offset)
            offset += struct.calcsize("<" + code)
    assert ours == theirs
