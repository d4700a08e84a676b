"""Compiles one kernel to PTX with NVRTC: nvrtc.py FILE ARCHITECTURE OUT.

NVRTC is found on LD_LIBRARY_PATH, as is the builtins library that it opens itself. Any message of the
compiler, a warning too, is an error.
"""

import ctypes
import pathlib
import sys


def compile_ptx(nvrtc, source: pathlib.Path, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None), "nvrtcCreateProgram")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={source.parent}"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
    # compute_70 itself is announced as deprecated; that is known.
    lines = [line for line in log.splitlines() if line.strip() and "are deprecated" not in line]
    if code or lines:
        sys.exit(f"{source}: NVRTC code {code}\n" + "\n".join(lines))
    return fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)


def fetch(size_of, contents_of, program) -> bytes:
    """Reads one of NVRTC's zero-ended texts."""
    size = ctypes.c_size_t()
    check(size_of(program, ctypes.byref(size)), "size")
    text = ctypes.create_string_buffer(size.value)
    check(contents_of(program, text), "contents")
    return text.value


def check(code: int, call: str) -> None:
    if code:
        sys.exit(f"NVRTC {call}: code {code}")


if __name__ == "__main__":
    source, architecture, out = sys.argv[1:]
    ptx = compile_ptx(ctypes.CDLL("libnvrtc.so.12"), pathlib.Path(source), architecture)
    pathlib.Path(out).write_bytes(ptx)
