#!/usr/bin/env python3
"""Test AUC of PyTorch on the Criteo sample, for several initializations.

Trains DLRM and DCN-v2 with the sizes of `flechette init` (dim 16, 100,000 rows per table, Adagrad 0.02,
batch 128, one epoch in file order) and prints the test AUC and log loss of each seed. Strings are hashed with
XXH3 as in `schema::Hash`, so ids are those of `flechette train`. The build and the tests do not use this
script.

The data is read from `../shared/data`, relative to the repository, or from `$FLECHETTE_DATA`. Needs torch,
numpy, xxhash (pip) and the zstd command.

    python3 benches/torch_quality.py --seeds 5 --embedding uniform,normal --dense dlrm,linear
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn import functional as F

DENSE, FEATURES, DIM, ROWS = 13, 26, 16, 100_000
BATCH, LR, EPS = 128, 0.02, 1e-10


def data_dir():
    beside = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
    return pathlib.Path(os.environ.get("FLECHETTE_DATA", beside))


def read(path):
    """Labels, log1p of the integers clamped at 0 (missing is 0), and hashed ids of a Criteo TSV."""
    text = subprocess.run(["zstd", "-dcq", str(path)], check=True, capture_output=True).stdout
    fields = [line.split(b"\t") for line in text.splitlines()]
    label = np.array([float(f[0]) for f in fields], np.float32)
    dense = np.array([[float(v or 0) for v in f[1:14]] for f in fields], np.float32)
    ids = np.array([[xxhash.xxh3_64_intdigest(v, 0) % ROWS for v in f[14:]] for f in fields], np.int64)
    assert ids.shape[1] == FEATURES
    dense = np.log1p(np.maximum(dense, 0))
    return torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(label)


def linear(fan_in, fan_out, scheme):
    """A layer. Scheme `dlrm`: Glorot normal, as in facebookresearch/dlrm; `linear`: nn.Linear's default."""
    layer = nn.Linear(fan_in, fan_out)
    if scheme == "dlrm":
        nn.init.normal_(layer.weight, 0.0, (2.0 / (fan_in + fan_out)) ** 0.5)
        nn.init.normal_(layer.bias, 0.0, (1.0 / fan_out) ** 0.5)
    elif scheme == "dlrm_zero_bias":
        nn.init.normal_(layer.weight, 0.0, (2.0 / (fan_in + fan_out)) ** 0.5)
        nn.init.zeros_(layer.bias)
    elif scheme == "he":
        nn.init.normal_(layer.weight, 0.0, (2.0 / fan_in) ** 0.5)
        nn.init.zeros_(layer.bias)
    return layer


def mlp(sizes, scheme, last_relu):
    layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [linear(fan_in, fan_out, scheme), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Rows(nn.Module):
    """All tables in one. The rows of feature t begin at row t * ROWS. Results are equal, with far fewer calls."""

    def __init__(self, scheme):
        super().__init__()
        self.table = nn.Embedding(FEATURES * ROWS, DIM, sparse=True, _weight=torch.empty(FEATURES * ROWS, DIM))
        weight = self.table.weight.data
        if scheme == "uniform":
            weight.uniform_(-((1 / ROWS) ** 0.5), (1 / ROWS) ** 0.5)
        else:
            weight.normal_(0.0, {"normal": 1.0, "normal_0.1": 0.1, "normal_0.01": 0.01}[scheme])
        self.offsets = torch.arange(FEATURES) * ROWS

    def forward(self, ids):
        return self.table(ids + self.offsets)


class Dlrm(nn.Module):
    def __init__(self, scheme):
        super().__init__()
        self.bottom = mlp([DENSE, 64, DIM], scheme, last_relu=True)
        vectors = FEATURES + 1
        self.top = mlp([DIM + vectors * (vectors - 1) // 2, 256, 128, 1], scheme, last_relu=False)
        self.lower = torch.tril_indices(vectors, vectors, offset=-1)

    def forward(self, dense, rows):
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], rows], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        return self.top(torch.cat([bottom, dots], 1))[:, 0]


class DcnV2(nn.Module):
    def __init__(self, scheme):
        super().__init__()
        width = DENSE + FEATURES * DIM
        self.cross = nn.ModuleList(linear(width, width, scheme) for _ in range(3))
        self.deep = mlp([width, 256, 128], scheme, last_relu=True)
        self.head = linear(width + 128, 1, scheme)

    def forward(self, dense, rows):
        x0 = torch.cat([dense, rows.flatten(1)], 1)
        x = x0
        for cross in self.cross:
            x = x0 * cross(x) + x
        return self.head(torch.cat([x, self.deep(x0)], 1))[:, 0]


MODELS = {"dlrm": Dlrm, "dcnv2": DcnV2}


def auc(scores, labels):
    """The AUC as a rank statistic; equal scores share their mean rank."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    positive = labels > 0.5
    n, p = len(labels), positive.sum()
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * (n - p)))


def run(kind, embedding, dense_scheme, seed, train, test, shuffle, lr):
    torch.manual_seed(seed)
    rows, model = Rows(embedding), MODELS[kind](dense_scheme)
    optimizer = torch.optim.Adagrad([*model.parameters(), *rows.parameters()], lr=lr, eps=EPS)
    dense, ids, label = train
    order = torch.randperm(len(label)) if shuffle else torch.arange(len(label))
    for take in order.split(BATCH):
        loss = F.binary_cross_entropy_with_logits(model(dense[take], rows(ids[take])), label[take])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        dense, ids, label = test
        logits = model(dense, rows(ids)).double()
        logloss = F.binary_cross_entropy_with_logits(logits, label.double()).item()
    return auc(logits.numpy(), label.numpy()), logloss


def main():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--models", default="dlrm,dcnv2")
    flags.add_argument("--embedding", default="uniform,normal", help="uniform, normal, normal_0.1, normal_0.01")
    flags.add_argument("--dense", default="dlrm,linear", help="dlrm, linear, dlrm_zero_bias, he")
    flags.add_argument("--seeds", type=int, default=5)
    flags.add_argument("--lr", type=float, default=LR)
    flags.add_argument("--shuffle", action="store_true", help="rows in random order instead of the file's")
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--json", action="store_true", help="one JSON object per line and scheme")
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    if not (data_dir() / "criteo_kaggle_train.tsv.zst").exists():
        sys.exit(f"no Criteo sample in {data_dir()}: set FLECHETTE_DATA")
    train, test = (read(data_dir() / f"criteo_kaggle_{part}.tsv.zst") for part in ("train", "test"))
    for kind in args.models.split(","):
        for embedding in args.embedding.split(","):
            for dense in args.dense.split(","):
                began = time.monotonic()
                found = [run(kind, embedding, dense, seed, train, test, args.shuffle, args.lr) for seed in range(args.seeds)]
                result = {
                    "model": kind, "embedding": embedding, "dense": dense, "lr": args.lr, "shuffle": args.shuffle,
                    "auc_median": round(statistics.median(a for a, _ in found), 4),
                    "logloss_median": round(statistics.median(l for _, l in found), 4),
                    "auc": [round(a, 4) for a, _ in found], "logloss": [round(l, 4) for _, l in found],
                    "seconds": round(time.monotonic() - began, 1),
                }
                print(json.dumps(result) if args.json else " ".join(f"{k}={v}" for k, v in result.items()), flush=True)


if __name__ == "__main__":
    main()
