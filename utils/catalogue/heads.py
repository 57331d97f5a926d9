"""The kinds of trained draft heads: a new kind begins here.

A kind is its head's name in `--drafter`, in a pair's `students` and as `kind` in a head's configuration. Its titles,
and the functions that build it, are in its row of sampling/drafters/registry.py, its names in other programs in
app/measure/elsewhere.py.
"""

BLOCK_KINDS = ("peagle", "dflash", "jetspec", "domino", "dflare", "dspark", "dflash2")  # draft a block in one pass
PUBLISHED_KINDS = ("eagle", *BLOCK_KINDS)  # their files are in their authors' format, which is translated
HEAD_KINDS = ("plain", "glide", "feature", *PUBLISHED_KINDS)  # first three: files of ours, glide also its authors'
