"""Local training compiled by numba: one client after the other, all its epochs in the cache.

Functions here work on NumPy arrays; `silograph.nn.compiled` hands them a block. They do what
`silograph.nn.fit` does with torch, in the same dtype and from the same draws, up to the order of
sums. Nothing of one client depends on another: a client's result has the same bits in a block of
any size and on any number of threads.

Some functions are longer than elsewhere: every array that a kernel touches is an argument, and a
call inside a loop over rows costs as much as a short row.

C: clients. n: rows. m: rows that take part in a layer. F: features. U: used rows of the first
matrices, of all clients; u: of one. H: hidden width. K: outputs. L: layers. D: output width of a
layer. M: 1, or 2 for GraphSAGE, whose first matrix maps neighbors and second the node itself. P:
weights after the first matrices: bias of layer 0, then matrices and bias of every further layer.
"""
