"""Files that ship with mtplab: the lab models and the demo's corpora (see the README of each folder)."""
