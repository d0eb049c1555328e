"""Shows what a push to the Hub would bring, the model card first; with --push, pushes.

    python examples/push.py                                  # the draft that ships with the package; nothing is sent
    python examples/push.py my-draft OWNER/NAME
    hf auth login && python examples/push.py my-draft OWNER/NAME --push

This is `hf-dspark push` in Python; a loaded draft model has `draft.push_to_hub("OWNER/NAME")`.
"""

from __future__ import annotations

import argparse
import sys

from hf_dspark import DSparkError
from hf_dspark.demo_weights import shipped_draft
from hf_dspark.hub import prepare, push_folder

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("draft", nargs="?", default=shipped_draft(), help="folder; default: the draft that ships")
parser.add_argument("repo_id", nargs="?", default="me/my-draft", help="OWNER/NAME")
parser.add_argument("--license", help="default: that of the target's card")
parser.add_argument("--base-model", help="the target's Hub id; default: the one that config.json names")
parser.add_argument("--push", action="store_true", help="really push")
options = parser.parse_args()

more = {"license": options.license, "base_model": options.base_model}
try:
    if options.push:
        publication, commit = push_folder(options.draft, options.repo_id, **more)
    else:
        publication, commit = prepare(options.draft, options.repo_id, offline=True, **more), None
except DSparkError as error:
    sys.exit(f"{error}")
print(publication.card)
print("Files:", ", ".join(sorted(publication.files)))
print("Left out:", ", ".join(publication.left_out) or "nothing")
for note in publication.notes:
    print(note)
print(f"Pushed: {commit.commit_url}" if commit else "Nothing was pushed; --push does it.")
