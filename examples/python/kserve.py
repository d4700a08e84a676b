"""Scores three samples of a model with tritonclient, a client of the KServe v2 protocol.

    pip install "tritonclient[grpc]" numpy
    python kserve.py 127.0.0.1:8001 MODEL

The values are invented: dense inputs are 0, strings are "a", ids are 0.
"""

import sys

import numpy as np
import tritonclient.grpc as triton

address, model = sys.argv[1:]
samples = 3


def tensor(name, datatype, values):
    tensor = triton.InferInput(name, values.shape, datatype)
    tensor.set_data_from_numpy(values)
    return tensor


with triton.InferenceServerClient(address) as client:
    inputs = []
    for described in client.get_model_metadata(model).inputs:
        name, datatype = described.name, described.datatype
        # -1 is the number of samples or, of a feature with several values a sample, the number of all values. Here each
        # sample has one.
        shape = [samples if size == -1 else size for size in described.shape]
        if name.endswith(":lengths"):
            values = np.ones(shape, np.int32)
        elif datatype == "BYTES":
            values = np.full(shape, b"a", np.object_)
        else:
            values = np.zeros(shape, {"FP32": np.float32, "INT64": np.int64}[datatype])
        inputs.append(tensor(name, datatype, values))
    result = client.infer(model, inputs)
    for score in result.as_numpy("score")[:, 0]:
        print(f"{score:.9g}")
