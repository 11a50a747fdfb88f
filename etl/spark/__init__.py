"""The stages of the job on Spark: the only folder that imports Spark."""

import sys

# spark-submit puts archives of an installed pyspark before its folder. They have no byte code, and each task of a
# worker would read their contents again.
sys.path[:] = [
    path
    for path in sys.path
    if not any(path.startswith(f"{folder}/pyspark/") for folder in sys.path)
]
