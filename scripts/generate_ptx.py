"""Compiles the CUDA kernels to PTX with NVRTC's C API. Run by `generate-ptx.sh`."""

import ctypes
import hashlib
import pathlib
import sys
import sysconfig

import zstandard

ROOT = pathlib.Path(__file__).resolve().parent.parent / "kernels"
# Compute capability 8.0 runs on all GPUs since 2020; the driver compiles the PTX for the actual GPU.
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false", "--device-as-default-execution-space"]


def check(library, code, doing):
    if code != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        sys.exit(f"error: {doing}: {library.nvrtcGetErrorString(code).decode()}")


def text(library, program, kind):
    """Text of an NVRTC program: its PTX or its log."""
    size = ctypes.c_size_t()
    check(library, getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), f"reading the {kind}")
    buffer = ctypes.create_string_buffer(size.value)
    check(library, getattr(library, f"nvrtcGet{kind}")(program, buffer), f"reading the {kind}")
    return buffer.value.decode()


def digest(source, headers):
    """SHA-256 of everything the PTX depends on: the source, all headers and the options."""
    whole = hashlib.sha256()
    for file in [source, *headers]:
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    whole.update(" ".join(OPTIONS).encode())
    return whole.hexdigest()


def main():
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit("usage: generate-ptx.sh [--check]")
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    library = ctypes.CDLL(site / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    headers = sorted((ROOT / "cuda").glob("*.cuh"))
    (ROOT / "ptx").mkdir(exist_ok=True)
    stale = []
    for source in sorted((ROOT / "cuda").glob("*.cu")):
        names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
        contents = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
        program = ctypes.c_void_p()
        code = library.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), contents, names
        )
        check(library, code, source.name)
        options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
        if library.nvrtcCompileProgram(program, len(OPTIONS), options) != 0:
            sys.exit(f"error: {source.name}:\n{text(library, program, 'ProgramLog')}")
        ptx = text(library, program, "PTX")
        # Removes comments and redundant white space, and shortens labels.
        ptx = ptx.replace("$L__BB", "$")
        lines = [" ".join(line.split()).replace(", ", ",") for line in ptx.splitlines() if line and not line.startswith("//")]
        written = f"// source-sha256 {digest(source, headers)}\n" + "\n".join(lines) + "\n"
        place = ROOT / "ptx" / f"{source.stem}.ptx.zst"
        is_stale = not place.exists() or zstandard.decompress(place.read_bytes()).decode() != written
        if is_stale:
            stale.append(place.name)
        if is_stale and not is_check:
            place.write_bytes(zstandard.compress(written.encode(), 22))
        print(f"{place.name}: {len(written)} bytes")
    if is_check and stale:
        sys.exit(f"error: out of date: {', '.join(stale)}; run scripts/generate-ptx.sh")


main()
