"""Reads Criteo lines from standard input, scores them with a server, and prints one score per line.

    pip install grpcio grpcio-reflection
    python score.py 127.0.0.1:8001 MODEL < criteo.tsv

Reflection gives the protocol from the server, so there is no generated code.
"""

import sys

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

address, model = sys.argv[1:]
channel = grpc.insecure_channel(address)
pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
service = pool.FindServiceByName("flechette.v1.Ctr")


def call(name, **fields):
    method = service.FindMethodByName(name)
    request = message_factory.GetMessageClass(method.input_type)(**fields)
    answer = message_factory.GetMessageClass(method.output_type)
    path = f"/{service.full_name}/{name}"
    return channel.unary_unary(path, type(request).SerializeToString, answer.FromString)(request)


columns = [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)]
rows = [dict(zip(columns, line.rstrip(b"\n").split(b"\t")[-39:])) for line in sys.stdin.buffer]
schema = call("GetModel", model=model)
for at in range(0, len(rows), 1000):  # server.max_samples is 4,096 by default
    batch = rows[at : at + 1000]
    dense = [float(row[column.name] or 0) for row in batch for column in schema.dense]
    features = [{"name": f.name, "strings": [row[f.name] for row in batch]} for f in schema.features]
    answer = call("Predict", model=model, samples=len(batch), dense=dense, features=features)
    for score in answer.scores:
        print(f"{score:.9g}")
