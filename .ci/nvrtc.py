"""Compiles one kernel with NVRTC: nvrtc.py LIBRARY FILE ARCHITECTURE OUT.

An architecture sm_NN gives machine code, compute_NN gives PTX. LIBRARY (for example libnvrtc.so.13) and the
builtins library that it loads must be on LD_LIBRARY_PATH. Any message of the compiler is an error, also a
warning. The options are those of src/device/cuda/compile.rs.
"""

import ctypes
import pathlib
import sys

OPTIONS = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]


def compile_kernel(nvrtc, source: pathlib.Path, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None), "nvrtcCreateProgram")
    options = [f"--gpu-architecture={architecture}", f"--include-path={source.parent}", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().strip("\0")
    # NVRTC always warns that compute_70 is deprecated; this is the only warning that is accepted.
    lines = [line for line in log.splitlines() if line.strip() and "are deprecated" not in line]
    if code or lines:
        sys.exit(f"{source}: NVRTC code {code}\n" + "\n".join(lines))
    if architecture.startswith("sm_"):
        return fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    return fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)


def fetch(size_of, contents_of, program) -> bytes:
    """Reads a result of NVRTC: the log, a cubin or PTX."""
    size = ctypes.c_size_t()
    check(size_of(program, ctypes.byref(size)), "size")
    contents = ctypes.create_string_buffer(size.value)
    check(contents_of(program, contents), "contents")
    return contents.raw


def check(code: int, call: str) -> None:
    if code:
        sys.exit(f"NVRTC {call}: code {code}")


if __name__ == "__main__":
    library, source, architecture, out = sys.argv[1:]
    made = compile_kernel(ctypes.CDLL(library), pathlib.Path(source), architecture)
    pathlib.Path(out).write_bytes(made)
