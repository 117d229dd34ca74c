"""The head's figures on documents that it was never trained on: `python evaluate.py --model FOLDER --head HEAD`.

`match` and `overlap` at depth 1 to 3 on the bundled corpora (held-out chapters and files, chat prompts): on the text
itself, teacher-forced, and on the target's own greedy continuation of it. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtplab import backend

CORPORA, PROMPTS, MADE = ("novel", "c", "chat"), 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    args = parser.parse_args()
    backend.setup()
    from mtplab.decode.quality import Agreement, agreement
    from mtplab.decode.settings import Settings
    from mtplab.models import load_target
    from mtplab.trials.arms import Session, parse_arm
    from mtplab.trials.corpus import load_corpora

    loaded, out = load_target(args.model, head="require", head_folder=args.head), {}
    session, settings = Session(loaded, parse_arm("baseline")), Settings(max_tokens=MADE, ignore_eos=True)
    for name in CORPORA:
        prompts, _ = load_corpora(
            [name], loaded.tokenizer, prompts=args.prompts, prompt_tokens=96, room=MADE, context=loaded.context
        )
        text, own = Agreement(), Agreement()
        for i, prompt in enumerate(prompts):
            tokens = list(prompt.tokens)
            made = list(session.request(tokens, request=i, settings=settings).tokens)
            text += agreement(loaded.target, loaded.head, tokens, start=8)
            own += agreement(loaded.target, loaded.head, tokens + made, start=len(tokens))
        for part, a in (("text", text), ("own_greedy", own)):
            row = {k: [round(x, 3) for x in getattr(a, k)] for k in ("match", "overlap")} | {
                "positions": a.positions[0]
            }
            out[f"{name}/{part}"] = row
            print(name, part, row, flush=True)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
