"""Virtual storage (`storage="virtual"`): maps the pages of a layer's blocks a second time, so that
its rows are contiguous tensors (vAttention, arXiv 2405.04437). Implements `seams.Storage`; imports
no other optional package."""

from .storage import fit_blocks as fit_blocks
from .storage import make_storage as make_storage
