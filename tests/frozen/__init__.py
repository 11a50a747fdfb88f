"""A reference of what a rewrite must not change: row orders, tables, checkpoints, JSON keys and public names.

    python -m tests.frozen compare FILE    prints each difference from a reference by its path; ends with 1 if any
    python -m tests.frozen write FILE      makes a reference of the sources as they are

`reference.json` and `stored/` were made by the last commit before the rewrite. When a change of behaviour is meant,
name it in CHANGELOG.md, write `reference.json` anew, and look at its differences in git. They may show only what
CHANGELOG.md names. Do not make `stored/` anew for that: it shows that tables and runs of before can still be read.
"""
