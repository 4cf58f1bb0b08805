"""What a rule needs and was not given, said once for all rules: the reasons of "not checked"."""

from __future__ import annotations

from normwise.rendering import both

__all__ = ["LOADER", "OPTIMIZER", "REAL_WEIGHTS", "TRAINED_WEIGHTS", "TRAIN_STEP", "USED_WEIGHTS"]

LOADER = both("needs the data: pass loader=...", "需要数据：传入 loader=...")
OPTIMIZER = both("needs the optimizer: pass optimizer=...", "需要优化器：传入 optimizer=...")
TRAIN_STEP = both("needs a training step: pass train_step=...", "需要训练步骤：传入 train_step=...")

REAL_WEIGHTS = both("needs real weights: the model's are not", "需要真实的权重：模型的权重不是")
TRAINED_WEIGHTS = both("needs trained weights: these are random", "需要训练过的权重：现在是随机的")
USED_WEIGHTS = both("needs the weights that are used: these are random", "需要实际使用的权重：现在是随机的")
