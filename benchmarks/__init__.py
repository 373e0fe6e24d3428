"""Measured rates, each beside its floor or peer in one run: ``make bench``."""
