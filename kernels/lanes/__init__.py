"""Lanes: steps executed layer by layer; the contract, and lanes in host memory."""
