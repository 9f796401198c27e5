"""Modules as after some training."""

import torch


def disturbed(module, by=0.3):
    """The module, its parameters moved at random."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return module
