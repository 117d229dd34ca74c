"""The texts that SmolLM2's head is trained on: `python texts.py --texts DIR --out DIR`.

DIR is what `experiments/000_lab_mtp/prepare.py --fetch` unpacked: the novels and the C sources less the held-out
documents, which the bundled corpora are cut from. Chat prompts are put together from topics and requests below, none of
which occur in the bundled chat corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
from pathlib import Path
from types import ModuleType

LAB = Path(__file__).parent.parent / "000_lab_mtp" / "texts.py"

TOPICS = (
    "rust on iron", "a lighthouse", "sourdough bread", "the water cycle", "bicycle gears", "a chess opening",
    "photosynthesis", "lightning", "the printing press", "glass making", "compound interest", "a vegetable garden",
    "tides", "beekeeping", "a sonnet", "the silk road", "earthquakes", "a compass", "paper recycling", "yeast",
    "the moon's phases", "knots for sailing", "a sundial", "migration of birds", "magnets", "coffee roasting",
    "a power plant", "public libraries", "rainbows", "the human heart", "steam engines", "maps", "desert animals",
    "a telescope", "woodworking joints", "soap", "river deltas", "clocks", "volcanoes", "electric motors",
    "linear equations", "prime numbers", "a city park", "ice ages", "cheese", "a fishing village", "windmills", "moss",
)  # fmt: skip
REQUESTS = (
    "Explain {} to a ten-year-old.", "Write a short paragraph about {}.", "List five facts about {}.",
    "What are common misunderstandings about {}?", "Write a four-line poem about {}.", "Give me a quiz question on {}.",
    "Summarize what matters most about {} in three sentences.", "Describe {} as if you saw it for the first time.",
    "What should a beginner know about {}?", "Compare {} with something similar.", "Why is {} interesting?",
    "Write a dialogue between two friends about {}.", "How would you teach {} in ten minutes?",
)  # fmt: skip
CODING = (
    "reverses a list", "counts the words in a string", "finds the largest number in an array", "checks for palindromes",
    "converts Celsius to Fahrenheit", "removes duplicates from a list", "reads a CSV file", "computes a factorial",
    "merges two dictionaries", "sorts words by length", "validates an email address", "draws a triangle of stars",
    "prints the multiplication table", "finds common elements of two lists", "rounds prices to two digits",
    "groups people by age", "parses a date", "flattens a nested list", "computes the average of a column",
)  # fmt: skip
LANGUAGES = ("Python", "C", "JavaScript", "Go", "Java")


def lab_texts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lab_texts", LAB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat() -> list[dict]:
    """Every combination once, shuffled."""
    asks = [r.format(t) for r, t in itertools.product(REQUESTS, TOPICS)]
    asks += [f"Write a {lang} function that {task}." for lang, task in itertools.product(LANGUAGES, CODING)]
    random.Random(20).shuffle(asks)
    return [{"id": f"{i:04d}", "messages": [{"role": "user", "content": a}]} for i, a in enumerate(asks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lab = lab_texts()
    files = {"chat": chat()}
    for kind, documents in lab.load(args.texts).items():
        files[kind] = [{"id": n, "text": t} for n, t in documents.items() if not lab.is_held_out(n) and t.strip()]
    args.out.mkdir(parents=True, exist_ok=True)
    for kind, rows in files.items():
        # Not the names of the bundled corpora: these texts are their training side.
        path = args.out / f"train-{kind}.jsonl"
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        print(path.name, len(rows))


if __name__ == "__main__":
    main()
