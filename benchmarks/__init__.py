"""Benchmarks: modules that measure and print, each `python -m benchmarks.NAME --json FILE`. None of them is a test."""
