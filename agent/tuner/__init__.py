"""One tuner: costs of the stages → forecast → candidates → value → choice. Read `tuner.py` last."""
