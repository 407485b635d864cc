"""Virtual machine monitors behind one contract (contract.py), one folder each. Knows nothing of storage,
network or guests.
"""
