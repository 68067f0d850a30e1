"""Tiers below the pool: evicted prefix blocks in host memory and in files (`prefix_tiers`), and the
blocks of one prompt in a file (`save_prefix`, `load_prefix`). Implements `seams.Tier` and
`rooms.TiersRoom`; imports no other optional package, but needs `fingerprints`."""

from ..rooms import require
from .saved_prefixes import load as load
from .saved_prefixes import save as save
from .store import check as check
from .store import make_tier as make_tier

require("fingerprints", "a prefix outside of the pool (`prefix_tiers`, `save_prefix`)")
