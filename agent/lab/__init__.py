"""Simulates pipelines, teaches the learned policy there, and judges policies. A wheel does not contain this folder."""
