"""Compiles the CPU kernels where torch and a compiler are at hand; everything else is in pyproject.toml.

An isolated build (plain ``pip install .``) has no torch, so it makes a wheel without them: normwise then computes
in plain torch and says so. With ``--no-build-isolation`` beside an installed torch the wheel is ``cp311-abi3``: one
binary for every Python from 3.11 and every torch from 2.10, for it uses only the stable ABIs of both.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/normwise/kernels/csrc")
TORCH_2_10 = "0x020a000000000000"
COMMON = [
    "-O2",  # the loops are written as vectors: -O3 makes them no faster, and takes half as long again
    "-ftree-vectorize",
    "-std=c++17",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unused-parameter",
    "-MD",
    "-g0",
]
# No contraction: a product and a sum are two roundings, as in the eager definition, unless the code says fma.
ARITHMETIC = ["-ffp-contract=off", "-fno-math-errno", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTIONS = {"baseline": (16, []), **({"avx2": (32, AVX2), "avx512": (64, AVX512)} if X86 else {})}
WITH_BF16 = {"avx512bf16": (64, [*AVX512, "-mavx512bf16"])} if X86 else {}
SANITIZE = os.environ.get("NORMWISE_SANITIZE")  # such as address,undefined: see `make sanitize`


class Build(build_ext):
    """Compiles kernels_*.cpp once for each instruction set, bf16_*.cpp for one; in parallel, and only what changed."""

    def build_extensions(self) -> None:
        """Compile and link all kernels."""
        compiler = self.compiler
        compile_all, compile_one = compiler.compile, compiler._compile
        jobs: list[tuple[Any, ...]] = []

        def note(obj: str, src: str, ext: str, cc_args: list[str], extra: list[str], pp_opts: list[str]) -> None:
            kind = Path(src).name.split("_")[0]
            if kind not in ("kernels", "bf16"):
                jobs.append((obj, src, ext, cc_args, extra, pp_opts))
                return
            for name, (width, flags) in (INSTRUCTIONS if kind == "kernels" else WITH_BF16).items():
                own = [*extra, *ARITHMETIC, *flags, f"-DNW_ISA={name}", f"-DNW_BYTES={width}"]
                jobs.append((_named(obj, name), src, ext, cc_args, own, pp_opts))

        def compile_in_parallel(*args: Any, **kwargs: Any) -> list[str]:
            jobs.clear()
            compile_all(*args, **kwargs)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda job: compile_one(*job), (job for job in jobs if _has_changed(job[0]))))
            return [job[0] for job in jobs]

        compiler._compile, compiler.compile = note, compile_in_parallel
        super().build_extensions()


def _named(obj: str, name: str) -> str:
    return obj.removesuffix(".o") + f".{name}.o"


def _has_changed(obj: str) -> bool:
    """Return whether an object is older than what it was made from, which the compiler wrote beside it."""
    made, listed = Path(obj), Path(obj).with_suffix(".d")
    if not made.exists() or not listed.exists():
        return True
    sources = [Path("setup.py"), *map(Path, listed.read_text().replace("\\\n", " ").split()[1:])]
    return any(not each.exists() or each.stat().st_mtime >= made.stat().st_mtime for each in sources)


def extensions() -> list[Extension]:
    """Return the kernels, or nothing where they cannot be compiled."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None or sys.platform == "win32":  # vector extensions are GCC's and Clang's
        return []
    if os.environ.get("NORMWISE_WITHOUT_KERNELS"):  # the Makefile compiles them in place
        return []
    root = Path(torch.origin).parent
    include = root / "include"
    if not (include / "torch/csrc/stable/ops.h").exists():
        return []
    # -O0: with checks around every access the optimizer takes many minutes
    sanitize = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-O0", "-g1"] if SANITIZE else []
    return [
        Extension(
            "normwise.kernels._cpu",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in SOURCES.glob("*.h")],
            include_dirs=[str(include)],
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_10), ("Py_LIMITED_API", "0x030b0000")],
            extra_compile_args=[*COMMON, "-MD", *sanitize],
            extra_link_args=sanitize,
            library_dirs=[str(root / "lib")],
            libraries=["torch_cpu", "torch"],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
    ]


modules = extensions()
setup(
    ext_modules=modules,
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if modules else {},
)
