#!/usr/bin/env python3
"""PyTorch behind Triton's Python back end: a peer of the bench `grpc`.

Serves every model of a Flechette directory under the same name, with the layers of its model.toml, the same
numbers of rows and random weights, in f32 on the CPU. Inputs are `dense` (samples x dense) and `ids` (samples
x tables). Prints `grpc=HOST:PORT` when it serves, and ends with its standard input.

    pip install nvidia-pytriton torch      # with Debian's own python3
    python3 benches/grpc/triton_server.py --models DIR
"""

import argparse
import os
import pathlib
import socket
import sys
import threading
import tomllib

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from torch import nn

LARGEST = 1024


def mlp(sizes, last_relu):
    layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Dlrm(nn.Module):
    def __init__(self, dense, tables, dim, architecture):
        super().__init__()
        vectors = tables + 1
        self.bottom = mlp([dense, *architecture["bottom"], dim], last_relu=True)
        self.top = mlp([dim + vectors * (vectors - 1) // 2, *architecture["top"], 1], last_relu=False)
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        self.lower = lower[0] * vectors + lower[1]

    def forward(self, dense, rows):
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], rows], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        return self.top(torch.cat([bottom, dots], 1))


class DcnV2(nn.Module):
    def __init__(self, dense, tables, dim, architecture):
        super().__init__()
        width, rank = dense + tables * dim, architecture.get("rank")

        def cross():
            if rank is None:
                return nn.Linear(width, width)
            return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

        self.cross = nn.ModuleList(cross() for _ in range(architecture["cross_layers"]))
        self.deep = mlp([width, *architecture["deep"]], last_relu=True)
        self.head = nn.Linear(width + architecture["deep"][-1], 1)

    def forward(self, dense, rows):
        first = torch.cat([dense, rows.flatten(1)], 1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(first)], 1))


class Model(nn.Module):
    """All tables in one EmbeddingBag, which is the fastest form. The rows of table t begin at t * rows."""

    def __init__(self, schema):
        super().__init__()
        tables, architecture = schema["tables"], schema["architecture"]
        self.dense, rows, dim = len(schema["dense"]), tables[0]["rows"], tables[0]["dim"]
        self.shape = (len(tables), dim)
        self.register_buffer("starts", torch.arange(len(tables)) * rows)
        self.bag = nn.EmbeddingBag(len(tables) * rows, dim, mode="sum")
        kind = {"dlrm": Dlrm, "dcnv2": DcnV2}[architecture["kind"]]
        self.layers = kind(self.dense, len(tables), dim, architecture)

    def forward(self, dense, ids):
        flat = (ids + self.starts).reshape(-1)
        rows = self.bag(flat, torch.arange(len(flat))).view(-1, *self.shape)
        return torch.sigmoid(self.layers(dense, rows))


def infer_function(model):
    @batch
    def infer(dense, ids):
        with torch.inference_mode():
            return {"score": model(torch.from_numpy(dense), torch.from_numpy(ids)).numpy()}

    return infer


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def schema_of(model):
    """The schema of the first version."""
    return tomllib.loads(next(iter(sorted(model.glob("*/model.toml")))).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    port = free_port()
    config = TritonConfig(grpc_port=port, http_port=free_port(), allow_metrics=False, log_verbose=0)
    with Triton(config=config) as triton:
        for directory in sorted(path for path in args.models.iterdir() if path.is_dir()):
            model = Model(schema_of(directory)).eval()
            triton.bind(
                model_name=directory.name,
                infer_func=infer_function(model),
                inputs=[
                    Tensor(name="dense", dtype=np.float32, shape=(model.dense,)),
                    Tensor(name="ids", dtype=np.int64, shape=(model.shape[0],)),
                ],
                outputs=[Tensor(name="score", dtype=np.float32, shape=(1,))],
                config=ModelConfig(max_batch_size=LARGEST, batcher=DynamicBatcher()),
            )
        triton.run()
        print(f"grpc=127.0.0.1:{port}", flush=True)
        ended = threading.Thread(target=sys.stdin.buffer.read)
        ended.start()
        ended.join()


if __name__ == "__main__":
    main()
