"""Computes scores from the files of a model version alone, without Flechette.

    pip install numpy xxhash
    python score_from_files.py models/ctr/1 < samples.jsonl
    python score_from_files.py --criteo-tsv models/ctr/1 < criteo.tsv

A line of samples.jsonl is one sample: {"I1": 3.5, "C1": "68fd1e64", "F1": [17, 4]}. A missing number is 0.
docs/schema.md explains every formula. Scores agree with the server's to about 1e-6: the server computes in
float32, this script decodes rows in float32 and computes in float64. Needs Python 3.11 or newer for tomllib.
"""

import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import xxhash

MASK = (1 << 64) - 1
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "U8": np.dtype("u1"), "U64": np.dtype("<u8")}


def read_tensors(path):
    """The tensors of a safetensors file, by name."""
    data = np.memmap(path, mode="r", dtype="u1")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            tensors[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def mix64(number):
    """The finalizer of SplitMix64."""
    x = (number + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def chain(directory):
    """The directories of a full version and of the deltas after it, up to this version."""
    base = json.loads((directory / "MANIFEST.json").read_text()).get("base")
    return (chain(directory.parent / str(base["version"])) if base else []) + [directory]


class Table:
    def __init__(self, schema, versions):
        self.rows, self.dim = schema["rows"], schema["dim"]
        self.element = schema.get("element", "f32")
        self.default = schema.get("default", "zeros")
        self.lossy_bits = schema.get("lossy_bits")
        full, *deltas = (read_tensors(version / "tables" / f"{schema['name']}.safetensors") for version in versions)
        self.weight = full["weight"]
        self.changed = {}  # the newest bytes of each row that a delta changed
        for delta in deltas:
            self.changed.update(zip(delta["keys"].tolist(), delta["weight"]))

    def row(self, id):
        """The float32 elements of the row of an id, or of the table's default."""
        if id >= self.rows:
            if self.default == "zeros":
                return np.zeros(self.dim, np.float32)
            if self.default == "error":
                raise ValueError(f"id {id} is beyond the {self.rows} rows of the table")
            id = self.default["row"]
        if self.lossy_bits is not None:
            id = mix64(id) >> (64 - self.lossy_bits)
        stored = self.changed.get(id)
        if stored is None:
            stored = self.weight[id]
        if self.element == "int8":  # the steps, padding to 4 bytes, scale and bias
            scale, bias = stored[-8:].view("<f4")
            return stored[: self.dim].astype(np.float32) * scale + bias
        return stored[: self.dim].astype(np.float32)


class Model:
    def __init__(self, directory):
        directory = Path(directory)
        self.schema = tomllib.loads((directory / "model.toml").read_text())
        self.dense = read_tensors(directory / "dense.safetensors")
        versions = chain(directory)
        self.tables = {table["name"]: Table(table, versions) for table in self.schema["tables"]}

    def score(self, sample):
        z = getattr(self, self.schema["architecture"]["kind"])(*self.inputs(sample))
        return 1 / (1 + np.exp(-z))

    def inputs(self, sample):
        """The transformed dense values, and for each feature its pooled vector and first-order weight."""
        columns = self.schema.get("dense", [])
        dense = np.array([transform(column, sample.get(column["name"], 0)) for column in columns], np.float64)
        vectors, wide = [], []
        for feature in self.schema["features"]:
            ids = self.ids(feature, sample.get(feature["name"], []))
            vectors.append(self.pool(feature, self.tables[feature["table"]], ids))
            if "wide_table" in feature:
                wide.append(self.pool(feature, self.tables[feature["wide_table"]], ids))
        return dense, vectors, wide

    def ids(self, feature, values):
        ids = []
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, (str, bytes)):
                text = value.encode() if isinstance(value, str) else value
                hash = feature["hash"]
                value = xxhash.xxh3_64_intdigest(text, hash.get("seed", 0)) % hash["modulus"]
            ids.append(value)
        return ids

    def pool(self, feature, table, ids):
        pooled = sum((table.row(id) for id in ids), np.zeros(table.dim, np.float32)).astype(np.float64)
        mean = feature.get("pooling", "sum") == "mean"
        return pooled / len(ids) if mean and ids else pooled

    def linear(self, name, x):
        """W x + b, as in torch.nn.Linear: W has the shape (outputs, inputs)."""
        return self.dense[f"{name}.weight"].astype(np.float64) @ x + self.dense[f"{name}.bias"]

    def mlp(self, name, x, layers, linear_end):
        for i in range(layers):
            x = self.linear(f"{name}.{i}", x)
            if not (linear_end and i + 1 == layers):
                x = np.maximum(x, 0)
        return x

    def dlrm(self, dense, vectors, _wide):
        shape = self.schema["architecture"]
        first = self.mlp("bottom", dense, len(shape["bottom"]) + 1, linear_end=False)
        stacked = np.stack([first, *vectors])
        products = stacked @ stacked.T
        below = np.tril_indices(len(stacked), -1)  # (1, 0), (2, 0), (2, 1), (3, 0), ...
        x = np.concatenate([first, products[below]])
        return self.mlp("top", x, len(shape["top"]) + 1, linear_end=True)[0]

    def dcn(self, dense, vectors, _wide):
        shape = self.schema["architecture"]
        x0 = x = np.concatenate([dense, *vectors])
        for i in range(shape["cross_layers"]):
            x = x0 * (self.dense[f"cross.{i}.weight"] @ x) + self.dense[f"cross.{i}.bias"] + x
        return self.cross_head(x0, x)

    def dcnv2(self, dense, vectors, _wide):
        shape = self.schema["architecture"]
        x0 = x = np.concatenate([dense, *vectors])
        for i in range(shape["cross_layers"]):
            if "rank" in shape:
                down = self.dense[f"cross.{i}.v"].astype(np.float64) @ x
                product = self.dense[f"cross.{i}.u"] @ down + self.dense[f"cross.{i}.bias"]
            else:
                product = self.linear(f"cross.{i}", x)
            x = x0 * product + x
        return self.cross_head(x0, x)

    def cross_head(self, x0, crossed):
        deep = self.mlp("deep", x0, len(self.schema["architecture"]["deep"]), linear_end=False)
        return self.linear("head", np.concatenate([crossed, deep]))[0]

    def wide_deep(self, dense, vectors, wide):
        first_order = np.concatenate(wide).sum()
        if len(dense):
            first_order += (self.dense["wide.weight"].astype(np.float64) @ dense)[0]
        x = np.concatenate([dense, *vectors])
        return first_order + self.mlp("deep", x, len(self.schema["architecture"]["deep"]) + 1, linear_end=True)[0]

    def deepfm(self, dense, vectors, wide):
        stacked = np.stack(vectors)
        second_order = 0.5 * (stacked.sum(axis=0) ** 2 - (stacked**2).sum(axis=0)).sum()
        return second_order + self.wide_deep(dense, vectors, wide)


def transform(column, value):
    kind, value = column.get("transform", "none"), np.float32(value)
    if kind == "log1p":
        return np.log1p(np.maximum(value, np.float32(0)))
    if kind == "none":
        return value
    return (value - np.float32(kind["standardize"]["mean"])) / np.float32(kind["standardize"]["std"])


def criteo_sample(line):
    fields = line.rstrip(b"\n").split(b"\t")[-39:]  # without the label, if there is one
    numbers = {f"I{i + 1}": float(fields[i] or 0) for i in range(13)}
    return numbers | {f"C{i + 1}": fields[13 + i] for i in range(26)}


if __name__ == "__main__":
    *flags, version = sys.argv[1:]
    read = criteo_sample if flags == ["--criteo-tsv"] else json.loads
    model = Model(version)
    for line in sys.stdin.buffer:
        print(f"{model.score(read(line)):.9g}")
