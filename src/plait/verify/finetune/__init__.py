"""Verification of runs that train a Hugging Face directory further.

twin.py       the step of transformers itself, unsharded, in float64
sharded.py    the step of the trainer on one rank
promises.py   what ranks are to issue
parity.py     all of that compared
"""
