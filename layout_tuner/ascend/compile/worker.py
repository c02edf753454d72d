"""Lower Triton kernels for Ascend, inside the toolchain's Python.

This file is run by its path, not imported: the toolchain's environment has triton-ascend and ascendnpu-ir and
nothing else, no torch and no layout_tuner. Each line of standard input is one request, each line of standard output
one answer, both JSON; `Request` and `Answer` in `layout_tuner.ascend.compile.compiler` say what they hold.

A request's kernel is imported from the folder that the caller's own package lies in, so what is lowered is what the
caller would launch.
"""

import contextlib
import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import zlib
from pathlib import Path
from typing import Any

# Read by triton-ascend when it is imported: keep the Python line of every operation. The caller may be interpreting
# kernels, this process compiles them.
os.environ["TRITON_DISABLE_LINE_INFO"] = "0"
os.environ.pop("TRITON_INTERPRET", None)

# `bishengir-compile` ends by calling `hivmc`, a part of CANN that writes the binary. What is asked here is decided
# before that call, so an empty object is answer enough.
HIVMC = """#!/bin/sh
case "$1" in --version) echo "hivmc 1.2.0"; exit 0 ;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2.o" && : > "$2_reloc.o"; shift; done
exit 0
"""

# Signals that say the compiler itself broke, which it does now and then on sound input: worth one more try.
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 128 + signal.SIGSEGV, 128 + signal.SIGABRT)
ATTEMPTS = 3

Fields = dict[str, Any]

running_group: int | None = None


def stop(signum: int, frame: types.FrameType | None) -> None:
    """End the compiler that is running, then this process."""
    if running_group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running_group, signal.SIGKILL)
    os._exit(128 + signum)


def run_limited(
    command: list[str], folder: Path, environment: dict[str, str], timeout_s: float
) -> tuple[int, str, bool]:
    """Run a command in a process group of its own and end the whole group after `timeout_s`.

    Returns:
        `(exit status, standard error, timed out)`.
    """
    global running_group
    with open(folder / "stderr", "w+b") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        running_group = process.pid
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Also after a plain exit: the compiler may have left a child behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            running_group = None
        errors.seek(0)
        return process.returncode, errors.read().decode(errors="replace"), timed_out


def register_package(name: str, folder: str) -> None:
    """Make `import name` find the package in `folder`, whatever is installed here."""
    if name in sys.modules:
        return
    parent, _, child = name.rpartition(".")
    if parent and parent not in sys.modules:
        # The parent's own code belongs to the caller's environment: an empty package stands in for it.
        package = types.ModuleType(parent)
        package.__path__ = []
        sys.modules[parent] = package
    spec = importlib.util.spec_from_file_location(
        name, Path(folder) / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package {name} in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if parent:
        setattr(sys.modules[parent], child, module)


def constant(value: Any) -> Any:
    """A constexpr from its JSON form: itself, or a Triton dtype given as `{"dtype": "fp32"}`."""
    if isinstance(value, dict):
        import triton.language as tl

        return tl.dtype(value["dtype"])
    return value


def front_end(request: Fields) -> tuple[str, float]:
    """Triton to linalg: `(text, seconds)`."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import (
        AscendAttrsDescriptor,
        AscendBackend,
        make_ttir,
        ttir_to_linalg,
    )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, folder in request["packages"].items():
        register_package(name, folder)
    for folder in request["path"]:
        if folder not in sys.path:
            sys.path.append(folder)
    kernel = importlib.import_module(request["module"])
    for part in request["kernel"].split("."):
        kernel = getattr(kernel, part)

    constants = {name: constant(value) for name, value in request["constexprs"].items()}
    signature = {}
    for name, kind in request["signature"].items():
        # Triton 3.2 takes an absent pointer as a constant of some pointer type.
        signature[name] = "*i8" if kind is None else kind
        if kind is None:
            constants[name] = None
    unknown = (set(signature) | set(constants)) ^ {parameter.name for parameter in kernel.params}
    if unknown:
        raise TypeError(f"{request['kernel']}: parameters missing or unknown: {', '.join(sorted(unknown))}")

    positions = {parameter.name: parameter.num for parameter in kernel.params}
    hints = {positions[name]: 16 for name in request["divisible_by_16"]}
    for name in request["equal_to_1"]:
        hints[positions[name]] = 1
        constants[name] = 1
    target = GPUTarget("npu", request["target"], 0)
    backend = AscendBackend(target)
    options = backend.parse_options(request["front_end_options"])

    start = time.perf_counter()
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constants=constants,
        attrs=AscendAttrsDescriptor.from_hints(hints),
    )
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {**vars(options), "target": target, "hash": "unused"}
    module = make_ttir(module, metadata, options)
    text = ttir_to_linalg(module, metadata, options, named_ops=True)
    return text, time.perf_counter() - start


def compile_linalg(linalg: str, request: Fields, folder: Path) -> Fields:
    """linalg to the final HIVM, printed in generic form: a dict of the answer's fields."""
    tools = Path(request["compiler"]).parent
    stubs = folder / "bin"
    stubs.mkdir()
    for name in ("hivmc", "hivmc-a5"):
        (stubs / name).write_text(HIVMC)
        (stubs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}{os.pathsep}{tools}{os.pathsep}{os.environ.get('PATH', '')}"}

    # triton-ascend takes this attribute off the text before it calls the compiler.
    (folder / "kernel.mlir").write_text(re.sub(r', mix_mode = "\w+"', "", linalg))
    temporaries = folder / "temps"
    command = [
        request["compiler"],
        "kernel.mlir",
        f"--target={request['target']}",
        *request["compiler_options"],
        # Releases before 1.2.0 do not know the option.
        *([] if request["stage"] == "verdict" else [f"--save-temps={temporaries}"]),
        "-o",
        "kernel",
    ]
    start = time.perf_counter()
    attempt = 0
    while True:
        attempt += 1
        shutil.rmtree(temporaries, ignore_errors=True)
        status, errors, timed_out = run_limited(command, folder, environment, request["timeout_s"])
        if status not in CRASHES or timed_out or attempt == ATTEMPTS:
            break
    answer: Fields = {
        "exit_status": status,
        "stderr": errors,
        "timed_out": timed_out,
        "attempts": attempt,
        "compiler_s": time.perf_counter() - start,
        "hivm": None,
    }
    final = temporaries / "module.hivm.opt.mlir"
    if status == 0 and final.exists():
        printed = folder / "generic.mlir"
        command = [
            request["printer"],
            str(final),
            "--mlir-print-op-generic",
            "--mlir-print-local-scope",
            "--mlir-print-debuginfo",
            "--mlir-disable-threading",
            "-o",
            str(printed),
        ]
        for _ in range(ATTEMPTS):
            status, errors, timed_out = run_limited(command, folder, environment, request["timeout_s"])
            if status not in CRASHES or timed_out:
                break
        if status == 0:
            answer["hivm"] = printed.read_text()
        else:
            answer.update(exit_status=status, stderr=answer["stderr"] + errors, timed_out=timed_out)
    return answer


def compile_cached(linalg: str, request: Fields) -> Fields:
    """`compile_linalg` behind a cache on disk, keyed by everything that decides the outcome.

    The cache only saves time: an entry that cannot be read is made anew, one that cannot be written is not kept.
    """
    key = hashlib.sha256(
        json.dumps(
            [
                linalg,
                request["stage"],
                request["target"],
                request["compiler_options"],
                request["compiler_version"],
                request["revision"],
            ]
        ).encode()
    ).hexdigest()
    entry = request["cache"] and Path(request["cache"]) / key[:2] / f"{key}.json.gz"
    if entry:
        # None there, no folder, no permission; cut short or damaged, which shows anywhere from gzip to JSON.
        with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, TypeError):
            kept: Fields = json.loads(gzip.decompress(entry.read_bytes()))
            return {**kept, "key": key, "cached": True}
    with tempfile.TemporaryDirectory(prefix="layout-tuner-") as folder:
        answer = compile_linalg(linalg, request, Path(folder))
    # A verdict is a fact about the input; a crash or a timeout is one about that run and is not kept.
    if entry and not answer["timed_out"] and answer["exit_status"] >= 0 and answer["exit_status"] not in CRASHES:
        with contextlib.suppress(OSError):
            keep(entry, gzip.compress(json.dumps(answer).encode(), compresslevel=3))
    return {**answer, "key": key, "cached": False}


def keep(entry: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        OSError: It cannot be written; nothing of it stays.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=entry.parent, delete=False) as fresh:
        try:
            fresh.write(content)
            fresh.flush()
            os.replace(fresh.name, entry)
        except OSError:
            os.unlink(fresh.name)
            raise


def describe(error: BaseException) -> tuple[str, str]:
    """`(message, line of Python)` of a front-end exception: its innermost cause, and the code that it is about."""
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or b"").decode(errors="replace") or str(error), ""
    source = ""
    while True:
        node, text = getattr(error, "node", None), getattr(error, "src", None)
        if node is not None and text is not None:
            source = text.splitlines()[node.lineno - 1].strip()
        inner = error.__cause__ or getattr(error, "error_message", None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    kind = type(error).__name__
    reason = getattr(error, "error_message", None) or (str(error) if source == "" or node is None else "")
    return f"{kind}: {reason}" if reason else f"{kind}: {error}", source


def serve(request: Fields) -> Fields:
    """The answer to one request."""
    start = time.perf_counter()
    answer: Fields = {"stage": "front end", "linalg": None, "stderr": "", "source": "", "exit_status": 1}
    try:
        answer["linalg"], answer["front_end_s"] = front_end(request)
    except Exception as error:
        answer["stderr"], answer["source"] = describe(error)
    else:
        if request["stage"] == "linalg":
            answer["exit_status"] = 0
        else:
            answer["stage"] = "compiler"
            try:
                answer.update(compile_cached(answer["linalg"], request))
            except Exception as error:
                # The compiler did not start, no room for its files: about this machine, not about the kernel.
                answer.update(stage="worker", stderr=f"{type(error).__name__}: {error}")
    answer["seconds"] = time.perf_counter() - start
    return answer


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGTERM, stop)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever triton or a kernel module prints must not mix with the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(serve(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
