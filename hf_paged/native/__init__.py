"""transformers' continuous-batching API on `PagedEngine`, after
`install(continuous_batching=True)`: the methods that replace those of models. Imports no other
room."""

from .continuous_batching import destroy_kept as destroy_kept
from .continuous_batching import replacements as replacements
from .continuous_batching import through_wrapper as through_wrapper
from .manager_config import set_default as set_default
