"""Random cases for scripts/fuzz.py: what is drawn, what is called, and the oracle's answer."""
