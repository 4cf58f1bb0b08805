"""What users' files look like: every form of answer a callable may give, and some it may not."""

import copy
from dataclasses import dataclass

import torch
from sibling_of_answers import make_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from normwise.targets import Target


@dataclass
class Config:
    hidden: "int" = 8


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, Config().hidden), norm, nn.Linear(8, 4)

    def forward(self, ids, mask=None):
        x = self.norm(self.embed(ids))
        return self.head(x if mask is None else x * mask[..., None])


READY = nn.Sequential(nn.Linear(3, 3))
NUMBER = 7


def model():
    return Net(make_norm(8))


def model_and_tuple():
    return model(), (torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5))


def model_and_dict():
    return model(), {"ids": torch.zeros(2, 5, dtype=torch.long)}


def model_and_tensor():
    return model(), torch.zeros(2, 5, dtype=torch.long)


def args_and_kwargs():
    ids = torch.zeros(2, 5, dtype=torch.long)
    return {"model": model(), "args": [ids], "kwargs": {"mask": torch.ones(2, 5)}}


def whole_target():
    return Target(model=model(), name="mine", args=(torch.zeros(2, 5, dtype=torch.long),))


def decayed():
    """One parameter group for everything, as PAR001 wants it."""
    net = model()
    return {
        "model": net,
        "inputs": (torch.arange(8)[None],),
        "optimizer": torch.optim.AdamW(net.parameters(), weight_decay=0.1),
        "claims": "causal",
        "config": {"norm_eps": 1e-5},
    }


def reloaded():
    """A checkpoint with a renamed norm, loaded without strict."""
    net = model()
    checkpoint = {key.replace("norm.", "ln."): value.clone() for key, value in net.state_dict().items()}
    info = copy.deepcopy(net).load_state_dict(checkpoint, strict=False)
    return {"model": net, "inputs": (torch.arange(8)[None],), "checkpoint": checkpoint, "load_info": info}


def trained():
    """Batch norm with a loader whose last batch is one sample, a step, an evaluation and the live model."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    return {
        "model": net,
        "inputs": (torch.randn(8, 4),),
        "padded_inputs": (torch.randn(8, 4),),
        "lengths": [1] * 8,
        "loader": DataLoader(TensorDataset(torch.randn(9, 4)), batch_size=8),
        "train_step": lambda m, x: m(x).sum().backward(),
        "eval_fn": lambda m, batches: [m(x) for x in batches],
        "online": copy.deepcopy(net),
        "reference": copy.deepcopy(net),
    }


def pretrained():
    return {"model": model(), "weights": "real", "notes": "trained on nothing"}


def unknown_weights():
    return {"model": model(), "weights": "trained"}


def half():
    return {"model": model().half(), "inputs": (torch.arange(8)[None],), "dtype": torch.float16}


def needs(depth, width=3):
    return nn.Linear(depth, width)


def raises():
    return model().no_such_attribute


def exits():
    raise SystemExit("usage: train.py")


def text():
    return "a model"


def nothing():
    return None


def three():
    return model(), torch.zeros(1), torch.zeros(1)


def misspelt():
    return {"model": model(), "optimiser": None}


def without_model():
    return {"inputs": torch.zeros(1)}


def bad_inputs():
    return {"model": model(), "inputs": 3}
