#!/usr/bin/env bash
# Writes src/flechette/v1/ from proto/flechette/v1/ctr.proto: messages, the service, and their types.
# The generated code runs with protobuf 6.31 or newer, and with grpcio 1.74 or newer.
set -euo pipefail
cd "$(dirname "$0")"

tools=${1:-../../target/python-generate}
if [[ ! -x $tools/bin/protoc-gen-mypy_grpc ]]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check grpcio-tools==1.74.0 mypy-protobuf==5.1.0
fi
PATH="$(realpath "$tools")/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc --proto_path=../../proto \
  --python_out=src --mypy_out=src --grpc_python_out=src --mypy_grpc_out=src flechette/v1/ctr.proto
touch src/flechette/v1/__init__.py
