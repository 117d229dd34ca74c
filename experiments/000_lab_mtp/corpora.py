"""Cut the bundled corpora from the held-out documents: `python corpora.py --texts DIR --work DIR --out DIR`.

Two prompts a document, each of 112 tokens' worth of text starting at a line or paragraph break. Nothing of these
documents was trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import texts
from tokenizers import Tokenizer

TOKENS, AT = 112, (0.2, 0.6)


def cut(tok: Tokenizer, text: str, share: float) -> str:
    """About TOKENS tokens from the first break after `share` of the text."""
    begin = text.index("\n", int(len(text) * share)) + 1
    piece = text[begin : begin + 12 * TOKENS].lstrip("\n")
    offsets = tok.encode(piece).offsets
    return piece[: offsets[min(TOKENS, len(offsets)) - 1][1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tok = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, documents in texts.load(args.texts).items():
        rows = []
        for name in sorted(n for n in documents if texts.is_held_out(n)):
            for share in AT:
                rows.append({"id": f"{name}@{share:.0%}", "text": cut(tok, documents[name], share)})
        # Both cuts of a document far apart: the first N prompts are N different documents.
        rows = rows[0::2] + rows[1::2]
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        (args.out / f"{kind}.jsonl").write_text(lines, encoding="utf-8")
        print(kind, len(rows), "prompts")


if __name__ == "__main__":
    main()
