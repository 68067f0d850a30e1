"""Detects changes to a model by reading everything that its forward depends on, so that prefixes
stay cached, and recorded steps valid, while other code runs. Implements `rooms.FingerprintsRoom`
and `model.state.ModelState`; imports no other optional package."""

from .state import fingerprint as fingerprint
from .state import read_state as read_state
