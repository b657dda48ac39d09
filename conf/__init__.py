"""Ships as `lightning_ckpt.conf`; `hydra.searchpath: [pkg://lightning_ckpt.conf]` finds it."""

# The YAML files name schemas, which must be registered before Hydra reads the first of them.
from lightning_ckpt import config as config
