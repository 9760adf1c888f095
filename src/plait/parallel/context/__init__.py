"""Exact attention over a sequence that is cut over a context axis, forward and backward.

    q_BNSH                   [B, N, S/cp, H]
    k_BKSH, v_BKSH           [B, K, S/cp, H]     each read by N/K query heads

The first is `attention.attend`; `tokens` takes a rank's own entries of what goes with the tokens.
"""
