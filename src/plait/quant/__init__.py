"""Numbers in eight and four bits: formats, scales, tensors made of them, and their products.

A matrix `[R, width]` is quantized in one or both orientations: in blocks along the `width` features of each row, as
forward and dgrad contract them, or along the R tokens of each column, as wgrad does.
"""
