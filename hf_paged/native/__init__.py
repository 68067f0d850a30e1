"""transformers' continuous-batching API on `PagedEngine`: the methods that replace models' methods
after `install(continuous_batching=True)`. Imports no other optional package."""

from .continuous_batching import destroy_kept_managers as destroy_kept_managers
from .continuous_batching import replacements as replacements
from .continuous_batching import wrapper_methods as wrapper_methods
from .manager_config import set_default as set_default
