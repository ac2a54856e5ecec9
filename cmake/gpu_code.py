"""For which GPU architectures an executable holds code: reads what nvcc has put into its section .nv_fatbin.

Run: python cmake/gpu_code.py FILE...   prints a line each: "FILE: 80 86 89 90 100 120 ptx:120"

A fat binary is a header {magic, u16 version, u16 header's bytes, u64 bytes of its entries} and entries {u16 kind (1: PTX, 2: machine
code), u16 version, u32 header's bytes, u64 payload's bytes, ... u32 architecture at 28}; a section has one for each source file."""

import struct
import sys
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


def section(file, wanted):
    """Of a 64-bit ELF file; empty if it has none of that name."""
    ident = file.read(64)
    if ident[:5] != b"\x7fELF\x02":
        return b""
    offset, = struct.unpack_from("<Q", ident, 40)
    size, count, names = struct.unpack_from("<HHH", ident, 58)
    file.seek(offset)
    headers = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]  # name, type, flags, address, offset, size
    file.seek(headers[names][4])
    texts = file.read(headers[names][5])
    for name, _, _, _, at, length in headers:
        if texts[name:texts.index(b"\0", name)] == wanted:
            file.seek(at)
            return file.read(length)
    return b""


def architectures(path):
    """(machine code, PTX): numbers such as 86."""
    with open(path, "rb") as file:
        data = section(file, b".nv_fatbin")
    found = {PTX: set(), MACHINE_CODE: set()}
    at = 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # between two of them
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, entry)
            found[kind].add(struct.unpack_from("<I", data, entry + 28)[0])
            entry += own + payload
        at = end
    return sorted(found[MACHINE_CODE]), sorted(found[PTX])


def text(path):
    machine_code, ptx = architectures(path)
    return " ".join([*map(str, machine_code), *(f"ptx:{number}" for number in ptx)]) or "none"


def main():
    for path in sys.argv[1:]:
        print(f"{Path(path).name}: {text(path)}")


if __name__ == "__main__":
    main()
