"""Collective GEMMs as data: in which order pieces are sent, received, multiplied and added.

A collective GEMM is a GEMM and the collective beside it, cut into pieces of tokens so that pieces travel while others
are multiplied (Wang et al., ASPLOS 2023; "collective matmul" in JAX). What it does is a list of steps per rank, built
by pure functions from the degree, the token split and a method. The same list is executed by `plait.overlap`, timed on
a simulated clock, proved by `plait.verify.static.schedule` and drawn by `plait bench overlap`.
"""
