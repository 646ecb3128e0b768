"""Whole networks and their layers: what bench_networks.py measures and how it reports it."""
