"""The part that knows torch only: it serves plain PyTorch and Fabric as well as Lightning."""
