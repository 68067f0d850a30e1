"""Virtual storage (`storage="virtual"`): the rows of a layer as contiguous tensors, whose pages are
those of its blocks (vAttention, arXiv 2405.04437). Its seam is `Storage`. Imports no other room."""

from .storage import fit_blocks as fit_blocks
from .storage import make_storage as make_storage
